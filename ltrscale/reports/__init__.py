"""Reports as data, and their output: Markdown with pictures, HTML with live charts, terminal text."""
