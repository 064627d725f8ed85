"""Starting a fleet: local processes. (One small interface; other launchers join it here.)"""
