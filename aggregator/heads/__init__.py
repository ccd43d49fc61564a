"""The life of heads: training, release, rollout, quarantine and operator commands."""
