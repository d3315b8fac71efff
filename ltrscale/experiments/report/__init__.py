"""The report that people look at: one page of HTML that opens without a network, and the same as Markdown."""
