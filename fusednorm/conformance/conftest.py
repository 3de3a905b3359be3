"""Loads the kit's plug-in where pytest is given the kit; too late for options, which need ``-p``."""

pytest_plugins = ["fusednorm.conformance.plugin"]
