"""The subcommands of ``cs-ctl``, one module each, with ``HELP``, ``add_arguments(parser)`` and ``run(options)``."""
