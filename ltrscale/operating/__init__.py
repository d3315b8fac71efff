"""Operating jobs on a Ray cluster: submitting and following them, and looking for what is wrong around them."""
