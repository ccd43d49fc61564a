"""What a device uploads: submissions and evaluations, made from its images."""
