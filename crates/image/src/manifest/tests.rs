//! Round trips, contradictions, and arbitrary JSON.

use proptest::prelude::*;
use serde_json::{Value, json};
use towline_protocol::ram::PAGE_SIZE;

use super::*;
use crate::atomic_file::{Existing, write_sidecar};

const PATH: &str = "guest.json";
const IMAGE_BYTES: u64 = 9 << 20;

fn blocks() -> Vec<RamBlock> {
    let block = |name: &str, length| RamBlock { name: name.into(), length, mapped: None };
    vec![block("pc.ram", 2 * CHUNK_BYTES + PAGE_SIZE), block("0000:00:02.0/vga.vram", PAGE_SIZE)]
}

/// Two device sections, EOF and the description.
fn device_state() -> DeviceState {
    let mut bytes = Vec::new();
    let mut devices = Vec::new();
    for (id, name) in [(2_u32, "timer"), (3, "cpu")] {
        bytes.push(4);
        bytes.extend(id.to_be_bytes());
        bytes.push(name.len() as u8);
        bytes.extend(name.as_bytes());
        bytes.extend([0, 0, 0, 0, 0, 0, 0, 12, 1, 2, 3, 0x7e]);
        bytes.extend(id.to_be_bytes());
        devices
            .push(json!({ "name": name, "instance_id": 0, "vmsd_name": name, "version": 12, "fields": [] }));
    }
    let description = json!({ "page_size": PAGE_SIZE, "devices": devices }).to_string();
    bytes.extend([0, 6]);
    bytes.extend((description.len() as u32).to_be_bytes());
    bytes.extend(description.as_bytes());
    DeviceState::parse(&bytes).unwrap()
}

fn origin() -> Origin {
    let qemu = Some("10.0.2".into());
    let capabilities = vec!["multifd".into()];
    Origin { source: "migration".into(), qemu, capabilities, was_running: Some(true), process: None }
}

fn contents<'a>(
    origin: &'a Origin,
    blocks: &'a [RamBlock],
    device_state: &'a DeviceState,
) -> ManifestContents<'a> {
    let hash = ChunkHash::Data([0xab; 32]);
    ManifestContents {
        origin,
        machine_type: "pc-q35-10.0",
        blocks,
        plain_pages: vec![1000, 0],
        hashes: vec![vec![hash, ChunkHash::Zero, hash], vec![ChunkHash::Zero]],
        device_state,
        image_bytes: IMAGE_BYTES,
        head: b"head",
        bitmaps: vec![Digest::of(b"bitmap"); 2],
        seal: Some(1 << 16),
        base: None,
    }
}

fn manifest() -> Manifest {
    Manifest::new(contents(&origin(), &blocks(), &device_state()))
}

fn value() -> Value {
    serde_json::to_value(manifest()).unwrap()
}

fn parse(value: &Value) -> Result<Manifest> {
    Manifest::parse(Path::new(PATH), &serde_json::to_vec(value).unwrap())
}

/// Error of the manifest with `value` at `pointer`.
fn refused(pointer: &str, value: Value) -> String {
    let mut changed = self::value();
    *changed.pointer_mut(pointer).unwrap() = value;
    parse(&changed).unwrap_err().to_string()
}

#[test]
fn a_manifest_is_stored_and_loaded() {
    let directory = tempfile::TempDir::new().unwrap();
    let image = directory.path().join("guest.img");
    let path = sidecar_path(&image);
    assert_eq!(Manifest::load(&path, &blocks()).unwrap(), None);
    let mut manifest = manifest();
    let text = manifest.to_json(&path).unwrap();
    write_sidecar(&path, &text, Existing::Refuse).unwrap();
    assert_eq!(Manifest::load(&path, &blocks()).unwrap(), Some((manifest.clone(), Digest::of(&text))));
    let text = std::fs::read_to_string(directory.path().join("guest.img.manifest.json")).unwrap();
    assert!(text.contains("\"format\": \"towline-image\",\n  \"version\": 1,"), "{text}");
    assert!(text.contains("null,\n"), "{text}");
    manifest.blocks[0].chunks.pop();
    assert!(matches!(manifest.to_json(&image), Err(Error::Field { .. })), "no reader would accept it");
}

#[test]
fn a_manifest_has_the_values_from_which_it_was_made() {
    let (origin, device_state, manifest) = (origin(), device_state(), manifest());
    assert_eq!((&*manifest.machine_type, &manifest.origin), ("pc-q35-10.0", &origin));
    assert_eq!(manifest.created_by, format!("towline {}", env!("CARGO_PKG_VERSION")));
    assert!(manifest.created <= Timestamp::now());
    assert_eq!((manifest.blocks[0].pages_plain, manifest.blocks[0].pages_zero), (1000, 25));
    assert_eq!(manifest.chunk_hash(BlockIndex(0), 2), ChunkHash::Data([0xab; 32]));
    let state = &manifest.device_state;
    assert_eq!(state.offset + state.length, manifest.image.length);
    let names: Vec<_> = state.devices.iter().map(|device| (device.name.as_str(), device.offset)).collect();
    assert_eq!(names, [("timer", 0), ("cpu", device_state.devices()[1].offset as u64)]);
}

#[test]
fn unknown_fields_are_ignored() {
    let mut value = value();
    value["later"] = json!({ "a": [1, 2] });
    value["blocks"][0]["later"] = json!("b");
    value["origin"].as_object_mut().unwrap().remove("capabilities");
    let mut expected = manifest();
    expected.origin.capabilities.clear();
    let parsed = parse(&value).unwrap();
    assert_eq!((parsed.blocks, parsed.origin), (expected.blocks, expected.origin));
}

#[test]
fn a_newer_version_is_refused_before_its_fields_are_read() {
    let error =
        Manifest::parse(Path::new(PATH), br#"{"format": "towline-image", "version": 3, "blocks": 7}"#);
    let error = error.unwrap_err();
    assert!(matches!(error, Error::Version { found: 3, known: 2, .. }), "{error}");
    assert!(
        matches!(parse(&json!({ "format": "x", "version": 1 })), Err(Error::Format { found, .. }) if found == "x")
    );
    assert!(
        matches!(parse(&json!({})), Err(Error::Json { why, .. }) if why.contains("missing field `format`"))
    );
}

#[test]
fn contradictory_fields_are_named() {
    let q = |pointer: &str, value: Value, expected: &str| {
        let message = refused(pointer, value);
        assert!(message.starts_with(&format!("guest.json: {expected}")), "{message}");
    };
    q("/chunk_size", json!(4096), "`chunk_size` is 4096, expected 2097152; ");
    q("/blocks/0/length", json!(4097), "`blocks[0].length` is 4097, expected a multiple of 4096; ");
    q(
        "/blocks/1/length",
        json!(u64::MAX),
        "`blocks[1].length` is 18446744073709551615, expected at most 5238784 ",
    );
    q("/blocks/0/chunks", json!([null]), "`blocks[0].chunks` is 1 entries long, expected 3, ");
    q(
        "/blocks/1/pages_plain",
        json!(u64::MAX),
        "`blocks[1].pages_zero` is 1 beside 18446744073709551615 plain ones, ",
    );
    q("/blocks/1/name", json!("x".repeat(256)), "`blocks[1].name` is 256 bytes long (\"xxxx");
    q(
        "/machine_type",
        json!("x".repeat(257)),
        "`machine_type` is 257 bytes long, expected at most 256 bytes; ",
    );
    q(
        "/device_state/offset",
        json!(u64::MAX),
        "`device_state.offset` is 18446744073709551615, expected at most 94",
    );
    q(
        "/device_state/length",
        json!(1_u64 << 40),
        "`device_state.length` is 1099511627776, expected at most 67108864 ",
    );
    q(
        "/device_state/devices/1/offset",
        json!(0),
        "`device_state.devices[1].offset` is 0, expected 1 or more and less",
    );
    q(
        "/created",
        json!("yesterday"),
        "invalid manifest: a time is RFC 3339 in UTC, as 2025-11-21T09:30:00Z, not ",
    );
    q("/image/identity", json!("abc"), "invalid manifest: a hash has 64 hex digits, not \"abc\"");
}

#[test]
fn differences_from_the_image_are_named() {
    let (manifest, blocks, state) = (manifest(), blocks(), device_state());
    let found = ImageProperties {
        machine_type: "pc-q35-10.0",
        blocks: &blocks,
        head: b"head",
        device_state: state.bytes(),
        image_bytes: IMAGE_BYTES,
        seal: None,
    };
    let image = Path::new("guest.img");
    manifest.check(image, &found).unwrap();
    let q = |found: ImageProperties<'_>, expected: &str| {
        let message = manifest.check(image, &found).unwrap_err().to_string();
        assert!(message.starts_with(expected), "{message}");
    };
    let json = "guest.img.manifest.json";
    let machine =
        format!("{json}: `machine_type` is pc-q35-10.0, the image has pc-i440fx-7.2; the manifest belongs");
    q(ImageProperties { machine_type: "pc-i440fx-7.2", ..found }, &machine);
    q(
        ImageProperties { blocks: &blocks[..1], ..found },
        &format!("{json}: `blocks` is 2 entries long, the image has 1 entries"),
    );
    let mut others = self::blocks();
    others[1].length += PAGE_SIZE;
    q(
        ImageProperties { blocks: &others, ..found },
        &format!("{json}: `blocks[1].length` is 4096, the image has 8192; "),
    );
    others[0].name = "ram".into();
    q(
        ImageProperties { blocks: &others, ..found },
        &format!("{json}: `blocks[0].name` is pc.ram, the image has ram; "),
    );
    let short = format!("guest.img: the image has 9 bytes, its manifest {json} says 9437184; ");
    q(ImageProperties { image_bytes: 9, ..found }, &short);
    let identity = Digest::identity(b"Head", &blocks, Digest::of(state.bytes()));
    let other = format!("guest.img has the identity {identity}, its manifest {json} was made for ");
    q(ImageProperties { head: b"Head", ..found }, &other);
    let mut placed = self::blocks();
    towline_protocol::mapped_ram::place_all(&mut placed, 100);
    q(ImageProperties { blocks: &placed, ..found }, "guest.img has the identity ");
    let damaged = format!(
        "guest.img: the device state: its BLAKE3 is {}, the manifest {json} says ",
        Digest::of(b"state")
    );
    q(ImageProperties { device_state: b"state", ..found }, &damaged);
    // One byte of the second device, and then one of the first as well.
    let mut bytes = state.bytes().to_vec();
    let offset = state.devices()[1].offset;
    bytes[offset + 19] ^= 1;
    let at = manifest.device_state.offset + offset as u64;
    let one = format!(
        "guest.img: the device state, in device \"cpu\" (instance 0, from byte {at:#x} of the file): its"
    );
    q(ImageProperties { device_state: &bytes, ..found }, &one);
    bytes[19] ^= 1;
    q(ImageProperties { device_state: &bytes, ..found }, "guest.img: the device state: its BLAKE3 is ");
    let mut before_hashes = manifest.clone();
    before_hashes.device_state.devices.iter_mut().for_each(|device| device.blake3 = None);
    let message = before_hashes
        .check(image, &ImageProperties { device_state: &bytes, ..found })
        .unwrap_err()
        .to_string();
    assert!(message.starts_with("guest.img: the device state: its BLAKE3 is "), "{message}");
    manifest.verify_device_state(image, state.bytes()).unwrap();
    assert!(matches!(manifest.verify_device_state(image, b""), Err(Error::DeviceState { .. })));
}

#[test]
fn only_regular_files_within_the_limit_are_read() {
    let directory = tempfile::TempDir::new().unwrap();
    let image = directory.path().join("guest.img");
    let path = sidecar_path(&image);
    let load = || Manifest::load(&path, &blocks());
    std::fs::create_dir(&path).unwrap();
    assert!(matches!(load(), Err(Error::NotRegular { .. })));
    std::fs::remove_dir(&path).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0)
        .unwrap();
    assert!(matches!(load(), Err(Error::NotRegular { .. })));
    std::fs::remove_file(&path).unwrap();
    let limit = Manifest::bytes_max(&blocks());
    assert_eq!(limit, FIXED_BYTES_MAX + 2 * BLOCK_BYTES_MAX + 4 * CHUNK_HASH_BYTES_MAX);
    std::fs::File::create(&path).unwrap().set_len(limit + 1).unwrap();
    let error = load().unwrap_err();
    assert!(matches!(error, Error::TooLong { found, .. } if found == limit + 1), "{error}");
}

#[test]
fn a_large_guests_manifest_is_within_the_limit() {
    let mut manifest = manifest();
    let (chunks, length) = (4096, 4096 * CHUNK_BYTES);
    manifest.image.length = length * 2;
    manifest.blocks.truncate(1);
    manifest.blocks[0] = StoredBlock {
        name: "\u{1}".repeat(255),
        length,
        pages_plain: length / PAGE_SIZE,
        pages_zero: 0,
        bitmap: None,
        chunks: vec![ChunkHash::Data([255; 32]); chunks],
    };
    let bytes = manifest.to_json(Path::new(PATH)).unwrap();
    assert!(bytes.len() as u64 <= 4096 + BLOCK_BYTES_MAX + chunks as u64 * CHUNK_HASH_BYTES_MAX);
}

/// Any JSON value.
fn json_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,90}".prop_map(Value::from),
        "[0-9a-f]{64}".prop_map(Value::from),
        r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-6][0-9](\.[0-9]{1,9})?Z".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 24, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::hash_map("[a-z_]{1,9}", inner, 0..6)
                .prop_map(|map| Value::Object(map.into_iter().collect())),
        ]
    })
}

/// JSON pointers to all values of a manifest.
fn pointers(value: &Value, at: &str, all: &mut Vec<String>) {
    all.push(at.into());
    match value {
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(index, item)| pointers(item, &format!("{at}/{index}"), all));
        }
        Value::Object(map) => map.iter().for_each(|(key, item)| pointers(item, &format!("{at}/{key}"), all)),
        _ => {}
    }
}

proptest! {
    /// A few values of a valid manifest are replaced: it is refused, or it is consistent and can be written
    /// again.
    #[test]
    fn hostile_json_is_an_error_or_consistent(changes in prop::collection::vec((any::<prop::sample::Index>(), json_value()), 1..4)) {
        let mut value = value();
        for (index, change) in changes {
            let mut all = Vec::new();
            pointers(&value, "", &mut all);
            let pointer: &String = index.get(&all);
            *value.pointer_mut(pointer).unwrap() = change;
        }
        match parse(&value) {
            Ok(manifest) => {
                let again = Manifest::parse(Path::new(PATH), &manifest.to_json(Path::new(PATH)).unwrap());
                prop_assert_eq!(again.unwrap(), manifest);
            }
            Err(error) => prop_assert!(error.to_string().len() < 600),
        }
    }

    #[test]
    fn arbitrary_bytes_are_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200), value in json_value()) {
        prop_assert!(Manifest::parse(Path::new(PATH), &bytes).is_err());
        prop_assert!(parse(&value).is_err());
    }

    #[test]
    fn times_keep_their_second(seconds in 0..=253_402_300_799_u64) {
        let time = Timestamp::from(std::time::UNIX_EPOCH + std::time::Duration::from_secs(seconds));
        prop_assert_eq!(Timestamp::try_from(String::from(time)), Ok(time));
    }
}

#[test]
fn recorded_process_is_optional_and_bounded() {
    let (path, blocks) = (Path::new(PATH), blocks());
    let state = device_state();
    let with = |process| {
        let origin = Origin { process, ..origin() };
        Manifest::new(contents(&origin, &blocks, &state)).to_json(path)
    };
    let process = QemuProcess {
        command_line: "{\"version\":1}".into(),
        working_directory: Some("/srv".into()),
        disks: vec![StoredDisk::of("/srv/a.raw")],
    };
    let parsed = Manifest::parse(path, &with(Some(process.clone())).unwrap()).unwrap();
    assert_eq!(parsed.origin.process, Some(process));
    let without = with(None).unwrap();
    assert!(!String::from_utf8_lossy(&without).contains("process"));
    assert_eq!(Manifest::parse(path, &without).unwrap().origin.process, None);
    let command_line = "x".repeat(COMMAND_LINE_BYTES_MAX + 1);
    let error = with(Some(QemuProcess { command_line, working_directory: None, disks: Vec::new() }));
    let error = error.unwrap_err().to_string();
    assert!(
        error.contains("origin.process.command_line") && error.contains("at most 524288 bytes"),
        "{error}"
    );
}
