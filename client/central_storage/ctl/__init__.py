"""What looks at a running service from outside: step times, the profile and the timeline of a training."""
