"""The command line: flags, commands, and their output.

The packages below implement the commands. The code here parses arguments, calls the commands, and prints results.
"""
