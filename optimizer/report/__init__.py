"""What people read: console, script, page, document, deployment files. Pure renderings of stored studies."""
