//! Horizontal bars of counts, as SVG.
//!
//! ```text
//!   0 to 10 µs      ████████████████  12
//!   10 to 20 µs     ██████████████    10
//! ```

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::Error;
use crate::svg::{Drawn, Svg};

const MARGIN: i32 = 12;
/// Height of a line of text and of a bar with the space around it.
const ROW: i32 = 26;
const BAR: i32 = 16;
const FONT: i32 = 15;
/// Width of a letter; SVG does not tell how wide text is.
const LETTER: f64 = 7.4;
/// Space for the figure at the end of a bar.
const FIGURE: i32 = 80;
const COLOR: RGBColor = RGBColor(37, 99, 235);

/// A bar.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bar {
    /// Text to the left of the bar.
    pub label: String,
    /// Length of the bar.
    pub count: u64,
}

/// Draws bars on a scale that begins at zero. `None` if there is nothing to draw.
///
/// # Errors
/// The chart cannot be drawn.
pub fn bars(unit: &str, bars: &[Bar]) -> Result<Option<Svg>, Error> {
    match bars.iter().map(|bar| bar.count).max() {
        None | Some(0) => Ok(None),
        Some(top) => Svg::for_any_width(|svg, width| draw(svg, width as i32, unit, bars, top)).map(Some),
    }
}

fn draw(svg: &mut String, width: i32, unit: &str, bars: &[Bar], top: u64) -> Drawn {
    let longest = bars.iter().map(|bar| bar.label.chars().count()).max().unwrap_or(0);
    // Less than half of the width.
    let labels = ((longest as f64 * LETTER) as i32 + MARGIN).min(width * 12 / 25);
    let height = 2 * MARGIN + (bars.len() as i32 + 1) * ROW;
    // Pixels for each unit.
    let scale = f64::from(width - 2 * MARGIN - labels - FIGURE) / top as f64;
    let area = SVGBackend::with_string(svg, (width as u32, height as u32)).into_drawing_area();
    let plain = TextStyle::from(("sans-serif", FONT).into_font()).pos(Pos::new(HPos::Left, VPos::Center));
    let right = plain.pos(Pos::new(HPos::Right, VPos::Center));
    let begin = MARGIN + labels;
    let mut y = MARGIN;
    for Bar { label, count } in bars {
        let (middle, end) = (y + ROW / 2, begin + (*count as f64 * scale).round() as i32);
        let label = shortened(label, labels);
        area.draw(&Text::new(label, (begin - MARGIN, middle), right.clone()))?;
        let corners = [(begin, middle - BAR / 2), (end, middle + BAR / 2)];
        area.draw(&Rectangle::new(corners, COLOR.filled()))?;
        area.draw(&Text::new(count.to_string(), (end + 8, middle), plain.clone()))?;
        y += ROW;
    }
    area.draw(&PathElement::new(vec![(begin, MARGIN), (begin, y)], BLACK))?;
    area.draw(&Text::new(unit, (begin, y + ROW / 2), plain))?;
    area.present()?;
    Ok(())
}

/// Cuts a label to the width of the labels.
fn shortened(label: &str, width: i32) -> String {
    let letters = (f64::from(width - MARGIN) / LETTER).ceil() as usize;
    if label.chars().count() <= letters {
        return label.to_owned();
    }
    let kept: String = label.chars().take(letters.saturating_sub(1)).collect();
    format!("{kept}…")
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]

    use super::*;

    #[test]
    fn bars_are_as_long_as_their_counts() {
        let bar = |label: &str, count| Bar { label: label.into(), count };
        let svg = bars("faults", &[bar("0 to 1 µs", 200), bar("more <1>", 100)]).unwrap().unwrap();
        let svg = svg.as_str();
        let widths: Vec<f64> = svg
            .lines()
            .filter(|line| line.starts_with("<rect"))
            .filter_map(|line| line.split_once("width=\"")?.1.split_once('"')?.0.parse().ok())
            .collect();
        assert_eq!(widths.len(), 4, "{svg}");
        assert!((widths[0] / widths[1] - 2.0).abs() < 0.05, "{widths:?}");
        assert!(svg.contains("faults") && svg.contains("more &lt;1&gt;"), "{svg}");
        assert!(bars("s", &[]).unwrap().is_none());
        assert!(bars("s", &[bar("a", 0)]).unwrap().is_none());
    }

    #[test]
    fn a_long_label_is_cut() {
        let label = "x".repeat(200);
        let cut = shortened(&label, 420);
        assert!(cut.ends_with('…') && cut.chars().count() < 60, "{cut}");
        assert_eq!(shortened("short", 420), "short");
    }
}
