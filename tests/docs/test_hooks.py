"""Pages show docstrings without the markup that Markdown does not know."""

from scripts.docs_hooks import on_page_content


def test_roles_and_markers_of_code_are_not_shown() -> None:
    html = "<p>As :class:<code>~joulery.domain.Steps</code>.</p>\n<p>::</p>\n<pre><code>a::b</code></pre>"
    assert on_page_content(html) == "<p>As <code>Steps</code>.</p>\n<pre><code>a::b</code></pre>"
