"""Features to prototypes: held-out images, outliers, averages, principal prototypes and sums. Pure."""
