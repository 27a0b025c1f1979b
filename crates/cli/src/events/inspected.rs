//! The event `inspected`, by the kind of what was inspected.

use schemars::JsonSchema;
use serde::Serialize;
use towline_control::plan::StreamSummary;
use towline_control::qemu::Qemu;
use towline_control::run::recorded_command_line;
use towline_image::manifest::Manifest;
#[cfg(feature = "store")]
use towline_image::store::{ChunkTotals, ConditionalWrites, Garbage, StoredImage};
use towline_image::{Image, LayerInfo, Origin, PageCount, StoredGuest as _};
use towline_launch::{ParseError, Recorded};
use towline_migration::{Guest as _, Snapshot};
use towline_protocol::device_state::{DeviceSection, DeviceState};

use super::identifiers::Counters;

/// Subject of an inspection.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub(crate) enum Inspected<'a> {
    Image(Box<InspectedImage<'a>>),
    #[cfg(feature = "store")]
    StoredImage(InspectedStoredImage<'a>),
    Qemu(InspectedQemu<'a>),
    Stream(InspectedStream<'a>),
    #[cfg(feature = "store")]
    Store(InspectedStore<'a>),
}

objects! {
    #![serde(rename_all = "kebab-case")]

    /// An image in a file.
    InspectedImage<'a>(image: &'a Image, allocated: u64, blocks: &'a [Block<'a>], chain: &'a [Layer], verified: bool) {
        path: String = image.path().display().to_string(),
        machine_type: Option<&'a str> = Some(&image.configuration().machine_type),
        /// RunState of QEMU's QAPI; null: unknown.
        run_state: Option<&'a str> = image.devices().run_state(),
        length: u64 = image.length(),
        allocated: u64 = allocated,
        blocks: &'a [Block<'a>] = blocks,
        device_state: StatePlace = StatePlace::new(image),
        devices: Vec<Device<'a>> = devices(image.devices()),
        manifest: Option<ManifestSummary<'a>> = image.manifest().map(|manifest| ManifestSummary::new(image, manifest)),
        command_line: Option<CommandLine> = command_line(image.origin()),
        verified: bool = verified,
        loadable_by_qemu: bool = !image.is_incremental(),
        chain: &'a [Layer] = chain,
    }

    /// A running QEMU.
    InspectedQemu<'a>(qemu: &'a Qemu, capabilities: &'a [&'a str], blocks: &'a [Block<'a>]) {
        version: String = qemu.version_text(),
        machine_type: Option<&'a str> = Some(&qemu.facts().machine),
        /// RunState of QEMU's QAPI; null: unknown.
        run_state: Option<&'a str> = Some(qemu.facts().status.status.as_str()),
        uuid: &'a str = &qemu.facts().uuid,
        waits_for_migrate_incoming: bool = qemu.facts().waits_for_migrate_incoming(),
        blocked_reasons: &'a [String] = qemu.facts().blocked_reasons(),
        capabilities: &'a [&'a str] = capabilities,
        blocks: &'a [Block<'a>] = blocks,
    }

    /// A migration stream.
    InspectedStream<'a>(seen: &'a StreamSummary, blocks: &'a [Block<'a>], moved: &Snapshot) {
        machine_type: Option<&'a str> = seen.configuration.as_ref().map(|found| found.machine_type.as_str()),
        /// RunState of QEMU's QAPI; null: unknown.
        run_state: Option<&'a str> = seen.device_state.as_ref().and_then(DeviceState::run_state),
        blocks: &'a [Block<'a>] = blocks,
        device_state: SeenState = SeenState::new(seen.device_state.as_ref()),
        devices: Option<Vec<Device<'a>>> = seen.device_state.as_ref().map(devices),
        /// Counters of QEMU's query-migrate.
        ram: Counters = moved.entries().into_iter().collect(),
    }
}

objects! {
    #![serde(rename_all = "kebab-case", deny_unknown_fields)]

    /// Device state in a file.
    StatePlace(image: &Image) {
        offset: u64 = image.device_state_offset(),
        length: usize = image.devices().bytes().len(),
    }

    /// Device state of a stream, if it has arrived.
    SeenState(state: Option<&DeviceState>) {
        length: Option<usize> = state.map(|state| state.bytes().len()),
    }

    /// A device.
    Device<'a>(section: &'a DeviceSection) {
        name: &'a str = &section.name,
        instance: u32 = section.instance,
        version: u32 = section.version,
    }

    /// A manifest.
    ManifestSummary<'a>(image: &'a Image, manifest: &'a Manifest) {
        created: String = manifest.created.to_string(),
        source: &'a str = &manifest.origin.source,
        qemu: Option<&'a str> = manifest.origin.qemu.as_deref(),
        path: Option<String> = image.manifest_path().map(|path| path.display().to_string()),
        sealed: bool = image.is_sealed(),
    }

    /// The command line of the QEMU that ran the guest.
    CommandLine(recorded: &Result<Option<Recorded>, ParseError>, working_directory: Option<String>) {
        arguments: Vec<String> = recorded.iter().flatten().flat_map(|found| found.command_line().to_arguments())
            .map(|word| word.to_string_lossy().into_owned()).collect(),
        left_out: Vec<String> = recorded.iter().flatten().flat_map(Recorded::redacted_keys).cloned().collect(),
        working_directory: Option<String> = working_directory,
        error: Option<String> = recorded.as_ref().err().map(ToString::to_string),
    }

    /// An image of a chain.
    Layer(layer: &LayerInfo<'_>, allocated: u64) {
        path: String = layer.path.display().to_string(),
        created: Option<String> = layer.manifest.map(|manifest| manifest.created.to_string()),
        content: Option<String> = layer.manifest.map(|manifest| manifest.content().to_string()),
        chunks_read: usize = layer.chunks,
        allocated: u64 = allocated,
    }

    /// A RAM block.
    Block<'a>(name: &'a str, length: u64, pages: Pages) {
        name: &'a str = name,
        length: u64 = length,
        #[serde(flatten)]
        pages: Pages = pages,
    }
}

#[cfg(feature = "store")]
objects! {
    #![serde(rename_all = "kebab-case")]

    /// An image in an object store.
    InspectedStoredImage<'a>(location: &towline_image::Location, image: &'a StoredImage, blocks: &'a [Block<'a>], verified: bool) {
        location: String = location.to_string(),
        machine_type: Option<&'a str> = Some(&image.configuration().machine_type),
        /// RunState of QEMU's QAPI; null: unknown.
        run_state: Option<&'a str> = image.devices().run_state(),
        chunk_size: u64 = image.index().chunk_bytes,
        chunks: usize = image.index().all_names().count(),
        index_length: u64 = image.index_bytes(),
        blocks: &'a [Block<'a>] = blocks,
        device_state: StateLength = StateLength::new(image),
        devices: Vec<Device<'a>> = devices(image.devices()),
        created: String = image.index().created.to_string(),
        source: &'a str = &image.index().origin.source,
        qemu: Option<&'a str> = image.index().origin.qemu.as_deref(),
        command_line: Option<CommandLine> = command_line(image.origin()),
        verified: bool = verified,
        loadable_by_qemu: bool = false,
    }

    /// Garbage of an object store.
    InspectedStore<'a>(location: &towline_image::Location, found: &'a Garbage, bytes: u64, removed: bool) {
        location: String = location.to_string(),
        images: usize = found.images,
        uploads: usize = found.uploads,
        readers: usize = found.readers,
        kept: KeptChunks<'a> = KeptChunks::new(found),
        conditional_writes: Option<ConditionalWrites> = found.conditional_writes,
        used: ChunkTotals = found.used,
        young: ChunkTotals = found.young,
        garbage: Objects = Objects::new(found, bytes),
        removed: bool = removed,
    }
}

#[cfg(feature = "store")]
objects! {
    #![serde(rename_all = "kebab-case", deny_unknown_fields)]

    /// Device state in a store.
    StateLength(image: &StoredImage) {
        length: usize = image.devices().bytes().len(),
    }

    /// Chunks of replaced or removed images that are still read.
    KeptChunks<'a>(found: &'a Garbage) {
        #[serde(flatten)]
        chunks: ChunkTotals = found.kept,
        readers: &'a [String] = &found.kept_for,
    }

    /// A number of objects.
    Objects(found: &Garbage, bytes: u64) {
        objects: usize = found.objects.len(),
        bytes: u64 = bytes,
    }
}

/// Pages of a RAM block.
#[derive(Debug, Serialize, JsonSchema)]
#[serde(untagged, rename_all_fields = "kebab-case")]
pub(crate) enum Pages {
    Counted(PageCount),
    OfSize { page_size: u64 },
    Unknown {},
}

fn devices(state: &DeviceState) -> Vec<Device<'_>> {
    state.devices().iter().map(Device::new).collect()
}

fn command_line(origin: Option<&Origin>) -> Option<CommandLine> {
    let origin = origin?;
    let directory = origin.process.as_ref()?.working_directory.clone();
    Some(CommandLine::new(&recorded_command_line(origin), directory))
}

#[cfg(test)]
mod tests {
    use towline_image::QemuProcess;

    use super::*;

    #[test]
    fn a_record_that_cannot_be_read_is_shown_as_such() {
        let process = QemuProcess {
            command_line: r#"{"version":9,"options":[]}"#.into(),
            working_directory: None,
            disks: Vec::new(),
        };
        let shown = command_line(Some(&Origin { process: Some(process), ..Origin::default() })).unwrap();
        assert!(shown.error.as_ref().is_some_and(|error| error.contains('9')), "{shown:?}");
        assert!(command_line(Some(&Origin::default())).is_none());
    }
}
