"""Shared basics: errors, records, files, JSON and formatting.

Modules here import neither torch nor other packages of accel_train.
"""
