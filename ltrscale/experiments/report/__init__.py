"""The report: one offline HTML page, and the same as Markdown."""
