"""`samerun audit`: run an Accelerate script unchanged on 1 and 2 processes, and name what makes its runs differ."""
