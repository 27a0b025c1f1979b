//! Parts of all pages: the document around the body, tables and lists. Text of others is escaped here.

use std::fmt::Write as _;

use crate::Error;

const STYLE: &str = include_str!("style.css");
/// Number of classes of the style sheet for parts of a bar: `p0` and so on.
pub const PHASE_COLORS: usize = 8;

/// A page without scripts, which loads nothing.
pub fn document(title: &str, body: &str) -> String {
    let title = escape(title);
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{body}</body>\n</html>\n"
    )
}

/// A row of a table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    name: &'static str,
    value: String,
}

impl Row {
    /// Creates it.
    pub fn new(name: &'static str, value: impl Into<String>) -> Self {
        Self { name, value: value.into() }
    }
}

/// Adds a table under a heading.
pub fn table(body: &mut String, title: &str, rows: &[Row]) {
    let _ = writeln!(body, "<h2>{title}</h2>\n<table>");
    for Row { name, value } in rows {
        let _ = writeln!(body, "<tr><th>{name}</th><td>{}</td></tr>", escape(value));
    }
    body.push_str("</table>\n");
}

/// A part of a whole.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    /// Name.
    pub name: String,
    /// Share of the whole, in any unit.
    pub share: f64,
    /// Number of its color, of which there are [`PHASE_COLORS`].
    pub color: usize,
    /// Cells of the table; the first one is also the tooltip of the bar.
    pub cells: Vec<String>,
}

/// Adds a bar of the parts, as long as their shares, and a table of them under a heading, unless there are
/// none.
pub fn parts(body: &mut String, title: &str, parts: &[Part]) {
    let whole: f64 = parts.iter().map(|part| part.share).sum();
    if parts.is_empty() {
        return;
    }
    let (mut bar, mut rows) = (String::new(), String::new());
    for Part { name, share, color, cells } in parts {
        let (class, name) = (color % PHASE_COLORS, escape(name));
        let percent = share / whole.max(f64::MIN_POSITIVE) * 100.0;
        let tooltip = cells.first().map(|cell| format!(": {}", escape(cell))).unwrap_or_default();
        let _ = write!(
            bar,
            "<span class=\"p{class}\" style=\"width:{percent:.3}%\" title=\"{name}{tooltip}\"></span>"
        );
        let cells: String = cells.iter().map(|cell| format!("<td>{}</td>", escape(cell))).collect();
        let _ = writeln!(rows, "<tr><th><i class=\"p{class}\"></i> {name}</th>{cells}</tr>");
    }
    let _ = writeln!(
        body,
        "<h2>{title}</h2>\n<div class=\"bar\">{bar}</div>\n<table class=\"parts\">\n{rows}</table>"
    );
}

/// Adds a list under a heading, unless it is empty.
pub fn list(body: &mut String, title: &str, items: &[String]) {
    if items.is_empty() {
        return;
    }
    let _ = writeln!(body, "<h2>{title}</h2>\n<ul>");
    for item in items {
        let _ = writeln!(body, "<li>{}</li>", escape(item));
    }
    body.push_str("</ul>\n");
}

/// Escapes text for HTML: endpoints and errors contain names that others chose.
pub fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            letter if letter.is_control() => escaped.push('\u{fffd}'),
            letter => escaped.push(letter),
        }
    }
    escaped
}

/// Widths of a chart in pixels, of which the style shows the one that fits the screen with letters of the
/// text's size.
const WIDTHS: [(&str, u32); 2] = [("wide", 880), ("narrow", 360)];

/// Draws a chart in all widths.
pub(crate) fn for_any_width(draw: impl Fn(u32) -> Result<String, Error>) -> Result<String, Error> {
    let one = |(class, width)| Ok(draw(width)?.replacen("<svg", &format!("<svg class=\"{class}\""), 1));
    WIDTHS.into_iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped() {
        let mut body = String::new();
        table(&mut body, "Facts", &[Row::new("name", "<a> & \"b\"\u{1b}[1m")]);
        assert!(body.contains("&lt;a&gt; &amp; &quot;b&quot;\u{fffd}[1m"), "{body}");
        list(&mut body, "Nothing", &[]);
        assert!(!body.contains("Nothing"));
    }

    #[test]
    fn parts_are_as_long_as_their_shares() {
        let part =
            |name: &str, share: f64| Part { name: name.into(), share, color: 9, cells: vec!["<x>".into()] };
        let mut body = String::new();
        parts(&mut body, "Nothing", &[]);
        assert_eq!(body, "");
        parts(&mut body, "Whole", &[part("a & b", 1.0), part("c", 3.0)]);
        assert!(
            body.contains("class=\"p1\" style=\"width:25.000%\" title=\"a &amp; b: &lt;x&gt;\""),
            "{body}"
        );
        assert!(body.contains("width:75.000%") && body.contains("</i> c</th><td>&lt;x&gt;</td>"), "{body}");
        // Nothing of a whole of nothing.
        parts(&mut body, "Zero", &[part("z", 0.0)]);
        assert!(body.contains("width:0.000%"), "{body}");
    }

    #[test]
    fn phases_have_colors_of_their_own() {
        let color = |class: usize| {
            let (_, rest) = STYLE.split_once(&format!("\n.p{class} {{ background: ")).unwrap_or_default();
            rest.split_once(';').unwrap_or_default().0
        };
        let colors: std::collections::BTreeSet<_> = (0..PHASE_COLORS).map(color).collect();
        assert_eq!(colors.len(), PHASE_COLORS);
        assert!(!colors.contains(""));
    }

    #[test]
    fn a_document_has_dark_colors_and_loads_nothing() {
        let document = document("a", "");
        assert!(document.contains("prefers-color-scheme: dark"), "{document}");
        for reference in ["href=", "@import", "url("] {
            assert!(!document.contains(reference), "{reference}");
        }
    }
}
