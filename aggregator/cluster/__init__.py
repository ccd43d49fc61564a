"""Past one machine: training jobs on a Ray cluster. No other room imports this one."""
