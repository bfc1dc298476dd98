"""Data that come with Python and scikit-learn, so that recipes run without a download.

The data of users are read by the other packages of `data`."""
