"""Starting a fleet. What an engine's life is (:mod:`rlctl.launch.engine_run`) stands apart from where its processes run
(:class:`rlctl.launch.launcher.Launcher`): local ones, :mod:`rlctl.launch.processes`; other launchers join there."""
