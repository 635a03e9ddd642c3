"""The Strategy API, and how it opens a service."""
