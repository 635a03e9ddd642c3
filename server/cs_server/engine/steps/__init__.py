"""What replicas and the controller do in a run: runs, merge points, returns, commits and what is said again."""
