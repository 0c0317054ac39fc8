"""Files as text: one module per kind of file, ``kinds`` recognizes the kind, ``files`` reads files and folders."""
