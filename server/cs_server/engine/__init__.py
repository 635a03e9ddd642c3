"""The engine: it decides what every event means, and opens nothing."""
