//! Charts in all widths.

use crate::Error;

pub(crate) const STYLE: &str = include_str!("style.css");
/// Widths of a chart in pixels, of which the style shows the one that fits the screen with letters of the
/// text's size.
const WIDTHS: [(&str, u32); 2] = [("wide", 880), ("narrow", 360)];

pub(crate) type Drawn = Result<(), Box<dyn std::error::Error>>;

/// A chart in all widths. Its texts are escaped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Svg(String);

impl Svg {
    /// Draws a chart in all widths.
    pub(crate) fn for_any_width(draw: impl Fn(&mut String, u32) -> Drawn) -> Result<Self, Error> {
        let one = |(class, width)| {
            let mut svg = String::new();
            draw(&mut svg, width).map_err(Error::of)?;
            Ok(svg.replacen("<svg", &format!("<svg class=\"{class}\""), 1))
        };
        Ok(Self(WIDTHS.into_iter().map(one).collect::<Result<_, Error>>()?))
    }

    /// Its elements.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}
