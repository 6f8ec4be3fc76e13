"""The layers of the pipeline. None imports another; pipeline.py orders them."""
