//! Parts of all pages: the document around the body, tables and lists. Text of others is escaped here.

use std::fmt::Write as _;

pub(super) const STYLE: &str = include_str!("style.css");

/// A page without scripts, which loads nothing.
pub(crate) fn document(title: &str, body: &str) -> String {
    let title = escape(title);
    format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n{body}</body>\n</html>\n"
    )
}

/// A row of a table.
pub(crate) struct Row {
    name: &'static str,
    value: String,
}

impl Row {
    pub(crate) fn new(name: &'static str, value: impl Into<String>) -> Self {
        Self { name, value: value.into() }
    }
}

/// Adds a table under a heading.
pub(crate) fn table(body: &mut String, title: &str, rows: &[Row]) {
    let _ = writeln!(body, "<h2>{title}</h2>\n<table>");
    for Row { name, value } in rows {
        let _ = writeln!(body, "<tr><th>{name}</th><td>{}</td></tr>", escape(value));
    }
    body.push_str("</table>\n");
}

/// Adds a list under a heading, unless it is empty.
pub(crate) fn list(body: &mut String, title: &str, items: &[String]) {
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
pub(crate) fn escape(text: &str) -> String {
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
