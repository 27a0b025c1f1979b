//! Horizontal bars with their spread, in groups, as SVG.
//!
//! ```text
//!   a group
//!   QEMU's own   ████████████████─┼─    0.39
//!   towline      ██████████████─┼─      0.37
//! ```

use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use crate::Error;
use crate::svg::Svg;

const MARGIN: i32 = 12;
/// Height of a line of text and of a bar with the space around it.
const ROW: i32 = 26;
const BAR: i32 = 16;
/// Space before the name of a group.
const GROUP_GAP: i32 = 10;
const FONT: i32 = 15;
/// Width of a letter; SVG does not tell how wide text is.
const LETTER: f64 = 7.4;
/// Space for the figure at the end of a bar.
const FIGURE: i32 = 80;
const OWN: RGBColor = RGBColor(37, 99, 235);
/// `--muted` of the style.
const PEER: RGBColor = RGBColor(148, 163, 184);

/// Whose bar it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Emphasis {
    /// The program that the chart is about.
    Own,
    /// A program to compare with.
    Peer,
}

/// A bar with its spread.
#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    label: String,
    /// The printed median.
    shown: String,
    /// Median, smallest and largest value.
    value: [f64; 3],
    emphasis: Emphasis,
}

impl Bar {
    /// Creates the bar of a figure as tables print it, `0.39 (0.36–0.40)` or `0.39`. `None`: it is not a
    /// figure.
    pub fn new(label: &str, figure: &str, emphasis: Emphasis) -> Option<Self> {
        let (shown, spread) = figure.split_once(' ').unwrap_or((figure, ""));
        let number =
            |text: &str| text.parse().ok().filter(|number: &f64| number.is_finite() && *number >= 0.0);
        let median = number(shown)?;
        let value = match spread.strip_prefix('(').and_then(|spread| spread.strip_suffix(')')) {
            Some(spread) => {
                let (low, high) = spread.split_once('–')?;
                [median, number(low)?, number(high)?]
            }
            None if spread.is_empty() => [median; 3],
            None => return None,
        };
        Some(Self { label: label.to_owned(), shown: shown.to_owned(), value, emphasis })
    }
}

/// Bars under a name.
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    /// Name; empty: none is drawn.
    pub name: String,
    /// Bars from top to bottom.
    pub bars: Vec<Bar>,
}

/// Draws groups of bars on one scale, which begins at zero. `None` if there is nothing to draw.
///
/// # Errors
/// The chart cannot be drawn.
pub fn bars(unit: &str, groups: &[Group]) -> Result<Option<Svg>, Error> {
    let all = || groups.iter().flat_map(|group| &group.bars);
    let top = all().map(|bar| bar.value[2]).fold(0.0, f64::max);
    if top <= 0.0 {
        return Ok(None);
    }
    Svg::for_any_width(|width| chart(unit, groups, top, width as i32)).map(Some)
}

/// Draws them in this width, of which labels have less than half.
fn chart(unit: &str, groups: &[Group], top: f64, width: i32) -> Result<String, Error> {
    let all = || groups.iter().flat_map(|group| &group.bars);
    let longest = all().map(|bar| bar.label.chars().count()).max().unwrap_or(0);
    let label = ((longest as f64 * LETTER) as i32 + MARGIN).min(width * 12 / 25);
    let names = groups.iter().filter(|group| !group.name.is_empty()).count() as i32;
    let rows = all().count() as i32 + 1;
    let height = 2 * MARGIN + rows * ROW + names * (ROW + GROUP_GAP);
    let mut svg = String::new();
    let layout = BarLayout { label, scale: f64::from(width - 2 * MARGIN - label - FIGURE) / top };
    let size = (width as u32, height as u32);
    draw(SVGBackend::with_string(&mut svg, size), unit, groups, &layout).map_err(Error::of)?;
    Ok(svg)
}

struct BarLayout {
    /// Width of the labels.
    label: i32,
    /// Pixels for each unit.
    scale: f64,
}

type DrawResult<'a> = Result<(), DrawingAreaErrorKind<<SVGBackend<'a> as DrawingBackend>::ErrorType>>;

fn draw<'a>(backend: SVGBackend<'a>, unit: &str, groups: &[Group], layout: &BarLayout) -> DrawResult<'a> {
    let area = backend.into_drawing_area();
    let plain = TextStyle::from(("sans-serif", FONT).into_font()).pos(Pos::new(HPos::Left, VPos::Center));
    let right = plain.pos(Pos::new(HPos::Right, VPos::Center));
    let bold = TextStyle::from(("sans-serif", FONT, FontStyle::Bold).into_font())
        .pos(Pos::new(HPos::Left, VPos::Center));
    let begin = MARGIN + layout.label;
    let x = |value: f64| begin + (value * layout.scale).round() as i32;
    let mut y = MARGIN;
    for group in groups {
        if !group.name.is_empty() {
            y += GROUP_GAP;
            area.draw(&Text::new(group.name.as_str(), (MARGIN, y + ROW / 2), bold.clone()))?;
            y += ROW;
        }
        for bar in &group.bars {
            let middle = y + ROW / 2;
            let [median, low, high] = bar.value;
            let color = if bar.emphasis == Emphasis::Own { OWN } else { PEER };
            let label = shortened(&bar.label, layout.label);
            area.draw(&Text::new(label, (begin - MARGIN, middle), right.clone()))?;
            let corners = [(begin, middle - BAR / 2), (x(median), middle + BAR / 2)];
            area.draw(&Rectangle::new(corners, color.filled()))?;
            if high > low {
                area.draw(&PathElement::new(vec![(x(low), middle), (x(high), middle)], BLACK))?;
                for end in [low, high] {
                    area.draw(&PathElement::new(vec![(x(end), middle - 4), (x(end), middle + 4)], BLACK))?;
                }
            }
            area.draw(&Text::new(bar.shown.as_str(), (x(high) + 8, middle), plain.clone()))?;
            y += ROW;
        }
    }
    area.draw(&PathElement::new(vec![(begin, MARGIN), (begin, y)], BLACK))?;
    area.draw(&Text::new(unit, (begin, y + ROW / 2), plain))?;
    area.present()
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
    fn figures_are_read_as_tables_print_them() {
        let value = |figure: &str| Bar::new("a", figure, Emphasis::Own).map(|bar| bar.value);
        assert_eq!(value("0.39 (0.36–0.40)"), Some([0.39, 0.36, 0.40]));
        assert_eq!(value("177 (139–244)"), Some([177.0, 139.0, 244.0]));
        assert_eq!(value("1364"), Some([1364.0; 3]));
        for other in ["–", "", "met", "1 of 2", "1.0 (x–2)", "inf", "-1", "≤ 1.25 × directly"] {
            assert_eq!(value(other), None, "{other}");
        }
    }

    #[test]
    fn bars_are_as_long_as_their_medians() {
        let bar = |label: &str, figure: &str, emphasis| Bar::new(label, figure, emphasis).unwrap();
        let bars_of = vec![
            bar("QEMU's own", "2.0", Emphasis::Peer),
            bar("towline <1>", "1.0 (0.5–1.5)", Emphasis::Own),
        ];
        let group = Group { name: "save".into(), bars: bars_of };
        let svg = bars("seconds", &[group]).unwrap().unwrap().as_str().to_owned();
        let widths: Vec<f64> = svg
            .lines()
            .filter(|line| line.starts_with("<rect"))
            .filter_map(|line| line.split_once("width=\"")?.1.split_once('"')?.0.parse().ok())
            .collect();
        assert_eq!(widths.len(), 4, "{svg}");
        assert!((widths[0] / widths[1] - 2.0).abs() < 0.05, "{widths:?}");
        assert!(
            svg.contains("save") && svg.contains("seconds") && svg.contains("towline &lt;1&gt;"),
            "{svg}"
        );
        assert!(bars("s", &[]).unwrap().is_none());
        assert!(
            bars("s", &[Group { name: "a".into(), bars: vec![bar("a", "0", Emphasis::Own)] }])
                .unwrap()
                .is_none()
        );
    }

    #[test]
    fn a_long_label_is_cut() {
        let label = "x".repeat(200);
        let cut = shortened(&label, 420);
        assert!(cut.ends_with('…') && cut.chars().count() < 60, "{cut}");
        assert_eq!(shortened("short", 420), "short");
    }
}
