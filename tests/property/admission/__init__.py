"""Laws of the pool core over random histories."""
