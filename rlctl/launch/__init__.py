"""Starting a fleet. What an engine's life is (:mod:`rlctl.launch.engine_lifecycle`) stands apart from where its
processes run (:class:`rlctl.launch.interface.launcher.Launcher`): local ones,
:mod:`rlctl.launch.local.child_processes`; other launchers join there."""
