"""Meaning of the values of a table: labels, judged answers, and the parts of the data.

Modules here refuse values with two meanings, and show the flags. They choose no model."""
