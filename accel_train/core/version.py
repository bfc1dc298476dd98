"""The version of accel_train, for modules that must not import the top-level package."""

__version__ = "0.1.0"
