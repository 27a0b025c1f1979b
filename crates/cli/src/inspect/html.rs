//! `inspect --html FILE.html IMAGE [BASE]`: a page with a map of the memory by chunk, the devices as a tree,
//! and what differs from another image.
//!
//! The map is made from manifests, so no page is read. It has the parts of the page of `--report`. Out of scope: images without a
//! manifest, which have only counts, and images in object stores.

use std::path::Path;

use anyhow::Result;
use serde_json::{Value, json};
use towline_image::checksum::{CHUNK_BYTES, ChunkHash};
use towline_image::manifest::{Manifest, StoredBlock};
use towline_image::{Image, StoredGuest as _};
use towline_migration::Guest as _;
use towline_protocol::device_state::{DeviceSection, DeviceState};
use towline_report::page;

use crate::report::write_page;
use crate::units::{count, counted, size};

/// Cells in a row of a map.
const COLUMNS: usize = 128;
/// Maximum number of cells: in the map of a larger block a cell stands for several chunks.
const CELLS_MAX: usize = 128 * 64;
/// Side of a cell in pixels.
const CELL: usize = 7;

/// State of a chunk; of several in one cell, the greatest is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum CellState {
    Zero,
    /// As in the base.
    Shared,
    Plain,
    /// With other content than in the base.
    Changed,
}

impl CellState {
    /// Classes of the style, with their names.
    const ALL: [Self; 4] = [Self::Zero, Self::Shared, Self::Plain, Self::Changed];

    fn class(self) -> &'static str {
        match self {
            Self::Zero => "zero",
            Self::Shared => "shared",
            Self::Plain => "plain",
            Self::Changed => "changed",
        }
    }
}

/// Writes the page about `image`, compared with `base` if there is one.
pub(super) fn write(path: &Path, image: &Image, base: Option<&Image>) -> Result<()> {
    let mut sections = vec![summary(image, base)];
    match image.manifest() {
        Some(manifest) => sections.extend(maps(manifest, base.and_then(Image::manifest))),
        None => {
            let text = "no map: the image has no manifest; `towline copy IMAGE NEW` adds one";
            sections.push(json!({ "kind": "list", "title": "Memory", "items": [text] }));
        }
    }
    sections.extend(devices(image.devices(), base.map(Image::devices)));
    write_page(path, &page(&image.path().display().to_string(), "", &sections)?)
}

fn summary(image: &Image, base: Option<&Image>) -> Value {
    let machine = |image: &Image| image.configuration().machine_type.clone();
    let mut rows = vec![
        ("machine type", machine(image)),
        ("run state", image.devices().run_state().unwrap_or("unknown").to_owned()),
        ("file", size(image.length())),
        ("device state", size(image.devices().bytes().len() as u64)),
    ];
    rows.extend(
        image
            .manifest()
            .map(|manifest| ("created", format!("{}, from {}", manifest.created, manifest.origin.source))),
    );
    if let Some(base) = base {
        rows.push(("compared with", base.path().display().to_string()));
        if machine(base) != machine(image) {
            rows.push(("its machine type", machine(base)));
        }
        let line = |image: &Image| Some(image.origin()?.process.as_ref()?.command_line.clone());
        let lines = [base, image].map(line);
        if let [Some(there), Some(here)] = lines {
            rows.push(("command line", if there == here { "the same" } else { "another" }.to_owned()));
        }
    }
    json!({ "kind": "table", "title": "Summary", "rows": rows })
}

/// A map of each block; blocks of one chunk are listed.
fn maps(manifest: &Manifest, base: Option<&Manifest>) -> [Value; 2] {
    let shown: &[CellState] = match base {
        Some(_) => &[CellState::Zero, CellState::Shared, CellState::Changed],
        None => &[CellState::Zero, CellState::Plain],
    };
    let (mut maps, mut small) = (Vec::new(), Vec::new());
    for block in &manifest.blocks {
        let there = base.map(|base| base.blocks.iter().find(|other| other.name == block.name));
        let chunks = chunks(block, there.map(|block| block.map_or(&[][..], |block| &block.chunks)));
        match chunks.as_slice() {
            [chunk] => small.push(format!("{}: {}, {}", block.name, size(block.length), chunk.class())),
            chunks => maps.push(block_map(block, chunks)),
        }
    }
    let legend: Vec<_> = shown.iter().map(|state| state.class()).collect();
    [
        json!({ "kind": "maps", "title": "Memory", "legend": legend, "maps": maps }),
        json!({ "kind": "list", "title": "Blocks of one chunk", "items": small }),
    ]
}

fn block_map(block: &StoredBlock, chunks: &[CellState]) -> Value {
    let per_cell = chunks.len().div_ceil(CELLS_MAX).max(1);
    let number = |wanted: CellState| chunks.iter().filter(|chunk| **chunk == wanted).count();
    let counts = CellState::ALL.into_iter().filter(|chunk| number(*chunk) > 0);
    let counts: Vec<_> =
        counts.map(|chunk| format!("{} {}", count(number(chunk) as u64), chunk.class())).collect();
    let text = format!(
        "{}: {} of {} ({}); a cell is {}",
        size(block.length),
        counted(chunks.len() as u64, "chunk"),
        size(CHUNK_BYTES),
        counts.join(", "),
        size(per_cell as u64 * CHUNK_BYTES),
    );
    map(&block.name, &text, chunks, per_cell)
}

/// States of a block's chunks, compared with those of the same block in the base, if there is a base.
fn chunks(block: &StoredBlock, base: Option<&[ChunkHash]>) -> Vec<CellState> {
    let state = |(index, hash): (usize, &ChunkHash)| match base {
        None if *hash == ChunkHash::Zero => CellState::Zero,
        None => CellState::Plain,
        Some(base) if base.get(index) != Some(hash) => CellState::Changed,
        Some(_) if *hash == ChunkHash::Zero => CellState::Zero,
        Some(_) => CellState::Shared,
    };
    block.chunks.iter().enumerate().map(state).collect()
}

/// Draws cells of `per_cell` chunks, row by row; neighbours of one state are one rectangle.
fn map(name: &str, text: &str, chunks: &[CellState], per_cell: usize) -> Value {
    let states: Vec<CellState> =
        chunks.chunks(per_cell).filter_map(|cell| cell.iter().max().copied()).collect();
    let mut cells = Vec::new();
    for (row, states) in states.chunks(COLUMNS).enumerate() {
        let mut column = 0;
        for run in states.chunk_by(|one, next| one == next) {
            cells.push(json!({
                "class": run[0].class(),
                "x": column * CELL,
                "y": row * CELL,
                "width": run.len() * CELL,
                "height": CELL - 1,
            }));
            column += run.len();
        }
    }
    let height = states.len().div_ceil(COLUMNS) * CELL;
    json!({ "name": name, "text": text, "width": COLUMNS * CELL, "height": height, "cells": cells })
}

/// Devices as a tree by the parts of their names, which QEMU separates by slashes: a bus address and what is
/// there.
fn devices(here: &DeviceState, base: Option<&DeviceState>) -> [Value; 2] {
    let mut found: Vec<(Vec<&str>, String)> = Vec::new();
    let mut differences = Vec::new();
    for device in here.devices() {
        let difference = base.and_then(|base| difference(here, device, base));
        let mark = difference.map_or(String::new(), |what| format!(", {what}"));
        let line = format!("instance {}, version {}{mark}", device.instance, device.version);
        if let Some(what) = difference {
            differences.push(format!("{} (instance {}): {what}", device.name, device.instance));
        }
        found.push((device.name.split('/').collect(), line));
    }
    let gone = base.iter().flat_map(|base| base.devices()).filter(|device| find(here, device).is_none());
    differences.extend(
        gone.map(|device| format!("{} (instance {}): only in the base", device.name, device.instance)),
    );
    found.sort_by(|one, other| one.0.cmp(&other.0));
    [
        json!({ "kind": "list", "title": "Devices that differ", "items": differences }),
        json!({ "kind": "tree", "title": "Devices", "branches": branches(&found, 0) }),
    ]
}

/// Branches of sorted devices that are equal in all parts before this one.
fn branches(found: &[(Vec<&str>, String)], part: usize) -> Value {
    let groups = found.chunk_by(|one, next| one.0[part] == next.0[part]);
    let branch = |group: &[(Vec<&str>, String)]| {
        let here = group.iter().take_while(|(parts, _)| parts.len() == part + 1).count();
        let texts: Vec<&str> = group[..here].iter().map(|(_, text)| text.as_str()).collect();
        json!({
            "name": group[0].0[part],
            "text": texts.join("; "),
            "branches": branches(&group[here..], part + 1),
        })
    };
    groups.map(branch).collect()
}

/// Difference of a device from the one in the base.
fn difference(here: &DeviceState, device: &DeviceSection, base: &DeviceState) -> Option<&'static str> {
    match find(base, device) {
        None => Some("not in the base"),
        Some(other) if other.version != device.version => Some("another version"),
        Some(other) if base.content(other) != here.content(device) => Some("another state"),
        Some(_) => None,
    }
}

fn find<'a>(state: &'a DeviceState, device: &DeviceSection) -> Option<&'a DeviceSection> {
    state.devices().iter().find(|other| other.name == device.name && other.instance == device.instance)
}

#[cfg(test)]
mod tests {
    use towline_protocol::device_state::encode;

    use super::*;

    #[test]
    fn chunks_are_compared_with_those_of_the_base() {
        let data = |byte| ChunkHash::Data([byte; 32]);
        let block = |chunks: &[ChunkHash]| StoredBlock {
            name: "pc.ram".into(),
            length: chunks.len() as u64 * CHUNK_BYTES,
            pages_plain: 0,
            pages_zero: 0,
            bitmap: None,
            chunks: chunks.to_vec(),
        };
        let here = block(&[ChunkHash::Zero, data(1), data(2), ChunkHash::Zero, data(4)]);
        let base = [ChunkHash::Zero, data(1), data(3), data(9)];
        let [zero, plain] = [CellState::Zero, CellState::Plain];
        assert_eq!(chunks(&here, None), [zero, plain, plain, zero, plain]);
        let [shared, changed] = [CellState::Shared, CellState::Changed];
        assert_eq!(chunks(&here, Some(&base)), [zero, shared, changed, changed, changed]);
    }

    #[test]
    fn neighbours_are_drawn_as_one_and_a_cell_shows_its_greatest_chunk() {
        let mut chunks = vec![CellState::Zero; COLUMNS + 2];
        chunks[COLUMNS + 1] = CellState::Plain;
        let drawn = map("a", "", &chunks, 1);
        let cell = |class: &str, x, y, width: usize| json!({ "class": class, "x": x, "y": y, "width": width, "height": CELL - 1 });
        let width = COLUMNS * CELL;
        let expected =
            json!([cell("zero", 0, 0, width), cell("zero", 0, CELL, CELL), cell("plain", CELL, CELL, CELL)]);
        assert_eq!(drawn["cells"], expected);
        assert_eq!(map("a", "", &chunks, 2)["cells"].as_array().map(Vec::len), Some(2));
    }

    #[test]
    fn devices_are_a_tree_and_differences_are_listed() {
        let state = |devices: &[(&str, u32, &[u8])]| DeviceState::parse(&encode(devices)).unwrap();
        let here =
            state(&[("0000:00:02.0/e1000e", 2, b"a"), ("0000:00:02.0/x<y", 1, b"b"), ("rtc", 1, b"c")]);
        let base = state(&[("0000:00:02.0/e1000e", 2, b"A"), ("hpet", 1, b""), ("rtc", 1, b"c")]);
        let body = page("", "", &devices(&here, Some(&base))).unwrap();
        for part in [
            "<li>0000:00:02.0/e1000e (instance 0): another state</li>",
            "x&lt;y (instance 0): not in the base",
            "hpet (instance 0): only in the base",
            "<li>0000:00:02.0<ul><li>e1000e: instance 0, version 2, another state</li>",
            "<li>rtc: instance 0, version 1</li>",
        ] {
            assert!(body.contains(part), "{part}: {body}");
        }
    }
}
