"""Loads the kit's plug-in. pytest reads options earlier, so these need ``-p fusednorm.conformance.plugin``."""

pytest_plugins = ["fusednorm.conformance.plugin"]
