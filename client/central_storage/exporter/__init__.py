"""The exporter: a process beside a service that serves its metrics to Prometheus. Nothing else imports it."""
