"""Comparisons of methods: pipelines, cross-validations, studies, students, stacks, and the work of each week."""
