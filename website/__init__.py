"""The documentation site: what MkDocs needs besides docs/ (mkdocs.yml, `make site`)."""
