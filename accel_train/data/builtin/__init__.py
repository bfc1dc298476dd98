"""Data that ships with Python and scikit-learn, so that recipes run without a download.

The other packages of `data` read the data of users.
"""
