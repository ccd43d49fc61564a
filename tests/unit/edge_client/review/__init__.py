"""Review: findings, moved images, and the page."""
