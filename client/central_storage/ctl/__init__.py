"""``cs-ctl``: looks at services that run, explains what they do, and ends them. It also reads step times."""
