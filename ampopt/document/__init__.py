"""What a report is: a document of plain parts, rendered as text, Markdown, JSON or HTML."""
