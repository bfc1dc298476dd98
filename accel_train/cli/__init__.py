"""The command line: flags, commands, and what they print.

What a command does lives below; here it is read, called and shown."""
