//! Prints a page with one chart: `cargo run --example page > page.html`.

use towline_report::{Bar, Emphasis, Group, Row, bars, document, table};

fn main() -> Result<(), towline_report::Error> {
    let group = Group {
        name: "restore into cold memory".into(),
        bars: [
            ("QEMU's own", "0.39 (0.36–0.40)", Emphasis::Peer),
            ("towline", "0.37 (0.36–0.38)", Emphasis::Own),
        ]
        .into_iter()
        .filter_map(|(label, figure, emphasis)| Bar::new(label, figure, emphasis))
        .collect(),
    };
    let mut body = String::new();
    table(&mut body, "Summary", &[Row::new("guest", "3 GiB")]);
    if let Some(chart) = bars("seconds", &[group])? {
        body.push_str(&format!("<figure>{chart}</figure>\n"));
    }
    print!("{}", document("Restore", &body));
    Ok(())
}
