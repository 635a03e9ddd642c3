"""What notebooks show is escaped, and its pictures are well-formed."""

from __future__ import annotations

from xml.etree import ElementTree

from central_storage.diagnostics.html import histogram, section, table


def test_every_text_is_escaped_and_markup_is_not_escaped_twice() -> None:
    inner = table([("<b>", "&")], ("<th>",))
    shown = section("<script>", inner, "1 < 2")
    assert "<script>" not in shown
    assert [each.text for each in ElementTree.fromstring(shown).iter("td")] == ["<b>", "&"]
    assert ElementTree.fromstring(shown).find("b").text == "<script>"  # type: ignore[union-attr]


def test_a_histogram_has_a_bar_for_each_count() -> None:
    picture = ElementTree.fromstring(histogram([0, 4, 2], "-1", "<1>"))
    heights = [float(bar.get("height", "")) for bar in picture.iter("rect")]
    assert heights == [0.0, 48.0, 24.0]
    assert [text.text for text in picture.iter("text")] == ["-1", "<1>"]
    assert len(list(ElementTree.fromstring(histogram([0], "", "")).iter("rect"))) == 1
