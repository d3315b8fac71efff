"""A report as data, and the forms in which it is written: Markdown with pictures, HTML with live charts, a terminal."""
