"""Workers and scripts in other containers: serve, join, health."""
