use std::path::{Path, PathBuf};
use std::sync::Arc;

use towline_channel::Cancel;
use towline_launch::{AllowedCommandLine, CommandLine, HostArguments, QemuVersion, Recorded, RuntimeRoot};
use towline_memload::{Shape, Synthetic};
use towline_migration::Guest;

use super::guests::{PlannedGuests, is_vhost_user, names, plan};
use super::image::RunImage;
use super::*;
use crate::plan::{self as copies, Destination, Observer, ProcessGuest, ProcessSource, Source};

const NEW: QemuVersion = QemuVersion { major: 10, minor: 0 };

struct Silent;

impl Observer for Silent {}

/// A synthetic guest of this size.
#[derive(Debug)]
struct OfSize(u64);

struct OfProcess(Synthetic);

impl ProcessSource for OfSize {
    fn name(&self) -> &'static str {
        "mem"
    }

    fn create(&self) -> towline_migration::Result<Box<dyn ProcessGuest>> {
        Ok(Box::new(OfProcess(Synthetic::new(Shape::of_length(self.0))?)))
    }
}

impl ProcessGuest for OfProcess {
    fn run(&self, send: &mut dyn FnMut(&dyn Guest)) -> towline_migration::Result<()> {
        self.0.run(|guest| send(guest))
    }
}

fn planned(
    options: &RunOptions,
    image: &RunImage,
    version: Option<QemuVersion>,
) -> Result<PlannedGuests, Error> {
    plan(options, image, &options.host, version)
}

/// Options of one guest of this image.
fn options(image: &Path) -> RunOptions {
    RunOptions {
        host: HostArguments { binary: "qemu".into(), ..HostArguments::default() },
        root: RuntimeRoot::at("/nowhere".into()),
        ..RunOptions::of_one(ImageLocation::File(image.to_owned()))
    }
}

/// As [`options`], of two clones named web.
fn clones(image: &Path) -> RunOptions {
    RunOptions { name: Some("web".parse().unwrap()), count: 2, ..options(image) }
}

/// Adds settings and arguments of the user.
fn given(options: RunOptions, settings: &[&str], arguments: &[&str]) -> RunOptions {
    let settings = settings.iter().map(|text| text.parse().unwrap()).collect();
    let arguments = arguments.iter().map(Into::into).collect();
    RunOptions { host: HostArguments { settings, arguments, ..options.host.clone() }, ..options }
}

fn recorded(words: &str) -> Recorded {
    CommandLine::parse(words.split(' ')).unwrap().record().unwrap()
}

fn words(command_line: &AllowedCommandLine) -> String {
    let words = command_line.to_arguments();
    words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
}

/// The command line of the only guest.
fn allowed_by(options: &RunOptions, recorded: Option<&Recorded>) -> Result<AllowedCommandLine, Error> {
    Ok(GuestStart::new(options, recorded, 0, "a".parse().unwrap(), &options.host)?.command_line)
}

/// Copies a synthetic guest, whose memory is one block.
fn store(destination: &Destination, mib: u64) {
    let request = CopyRequest { overwrite: true, ..CopyRequest::default() };
    let source = Source::Process(Arc::new(OfSize(mib << 20)));
    copies::copy(&source, destination, &request, &Cancel::new().unwrap(), &Silent).unwrap();
}

fn image(directory: &Path) -> PathBuf {
    let path = directory.join("a.img");
    store(&Destination::Image(path.clone()), 8);
    path
}

/// Calls `test` with a context in which nothing is cancelled.
fn in_context<T>(test: impl FnOnce(PrepareContext<'_>) -> T) -> T {
    let cancel = Cancel::new().unwrap();
    test(PrepareContext { cancel: &cancel, observer: &Silent, downloading: &|_| {} })
}

fn opened(path: &Path) -> RunImage {
    in_context(|context| RunImage::open(&options(path), context)).unwrap()
}

#[test]
fn clones_are_numbered_and_one_guest_is_not() {
    let named = |options: &RunOptions| -> Vec<String> {
        names(options, "guest").unwrap().iter().map(ToString::to_string).collect()
    };
    let (one, two) = (options(Path::new("a.img")), clones(Path::new("a.img")));
    assert_eq!(named(&one), ["guest"]);
    assert_eq!(named(&RunOptions { count: 1, ..two.clone() }), ["web"]);
    assert_eq!(named(&two), ["web-0", "web-1"]);
    assert!(matches!(names(&one, "a b"), Err(Error::Name(_))));
}

#[test]
fn values_of_this_host_have_the_number_and_the_name_of_the_clone() {
    let settings = ["serial.0=unix:/run/{name}"];
    let mut options = given(options(Path::new("a.img")), &settings, &["-smbios", "type=1,serial={n}"]);
    options.host.working_directory = Some("/srv/{n}".into());
    let recorded = recorded("-serial vc");
    let start = GuestStart::new(&options, Some(&recorded), 3, "web-3".parse().unwrap(), &options.host);
    let host = start.unwrap().host;
    assert_eq!(host.settings[0].value, "unix:/run/web-3");
    assert_eq!(host.arguments, ["-smbios", "type=1,serial=3"]);
    assert_eq!(host.working_directory.as_deref(), Some(Path::new("/srv/{n}")));
    // A guest's output is kept in a ring buffer, not in files of the runtime directory.
    assert_eq!(host.console_directory, None);
}

#[test]
fn hostile_command_line_is_refused_by_name_unless_it_is_trusted() {
    let recorded = recorded("-machine q35 -drive file=/etc/shadow,if=none,id=d0,format=raw -nodefaults");
    let by = |options: &RunOptions| allowed_by(options, Some(&recorded));
    let hostile = options(Path::new("a.img"));
    let error = by(&hostile).unwrap_err().to_string();
    assert!(error.contains("drive.d0.file=/etc/shadow: comes from this host only"), "{error}");
    let set = given(hostile.clone(), &["drive.d0.file=/srv/d0.raw", "drive.d0.format=raw"], &[]);
    assert!(words(&by(&set).unwrap()).contains("file=/srv/d0.raw"));
    let trusted = RunOptions { trust: CommandLineTrust::Trusted, ..hostile };
    assert!(words(&by(&trusted).unwrap()).contains("/etc/shadow"));
}

#[test]
fn arguments_of_the_user_are_the_whole_command_line_of_an_image_without_one() {
    let options = given(options(Path::new("a.img")), &[], &["-m", "64M", "-monitor", "none"]);
    assert_eq!(words(&allowed_by(&options, None).unwrap()), "-m 64M -monitor none -display none");
}

#[test]
fn devices_of_other_processes_are_found() {
    let has = |words: &str| {
        let line = CommandLine::parse(words.split(' ')).unwrap();
        let line = line.accept(&HostArguments::default()).unwrap();
        line.command_line().options().iter().any(is_vhost_user)
    };
    assert!(has("-netdev vhost-user,id=n0,chardev=c0"));
    assert!(has("-device vhost-user-vsock-pci,chardev=c0"));
    assert!(!has("-netdev user,id=n0 -device virtio-net-pci,netdev=n0"));
}

#[test]
fn each_guest_gets_a_generation_id_and_an_overlay_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let path = image(directory.path());
    let disk = directory.path().join("a.raw").display().to_string();
    let drive = format!("file={disk},format=raw,if=none,id=d0");
    let overlaid = |overlays: Option<PathBuf>| {
        let options = given(clones(&path), &[], &["-drive", &drive]);
        planned(&RunOptions { disks: Disks::Overlays(overlays), ..options }, &opened(&path), Some(NEW))
    };
    for start in &overlaid(None).unwrap().starts {
        let [overlay] = start.overlays.as_slice() else { panic!("{:?}", start.overlays) };
        let path = directory.path().canonicalize().unwrap().join(format!("{}.d0.qcow2", start.name));
        assert_eq!((&overlay.path, overlay.base.as_str()), (&path, disk.as_str()));
        assert!(words(&start.command_line).contains("d0.qcow2,format=qcow2"), "{:?}", start.command_line);
    }
    let error = overlaid(Some("/nowhere".into())).unwrap_err();
    assert!(
        matches!(error, Error::Overlay(_)) && error.to_string().contains("directory /nowhere of overlays"),
        "{error:?}"
    );
    let recorded = recorded("-device vmgenid,guid=324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87");
    assert!(words(&allowed_by(&options(&path), Some(&recorded)).unwrap()).contains("guid=auto"));
}

#[test]
fn an_image_without_a_command_line_needs_arguments() {
    let directory = tempfile::tempdir().unwrap();
    let path = image(directory.path());
    let error = planned(&options(&path), &opened(&path), Some(NEW)).unwrap_err();
    assert!(matches!(error, Error::NoCommandLine { .. }), "{error:?}");
}

#[test]
fn memory_is_mapped_or_the_reason_is_said() {
    let directory = tempfile::tempdir().unwrap();
    let path = image(directory.path());
    let image = opened(&path);
    let old = QemuVersion { major: 7, minor: 2 };
    let name = &image.file().unwrap().ram_blocks()[0].name;
    let backend = format!("memory-backend-ram,id={name},size=8M");
    let machine = format!("q35,memory-backend={name}");
    let run = |memory, version, more: &[&str]| {
        let own = [&["-machine", &machine, "-object", backend.as_str()], more].concat();
        planned(&RunOptions { memory, ..given(clones(&path), &[], &own) }, &image, Some(version))
    };
    let any = MemoryRequest::MappedOrCopied;
    let PlannedGuests { starts, memory, .. } = run(any, NEW, &[]).unwrap();
    assert_eq!(memory, MemoryOrigin::Mapped);
    for start in &starts {
        let words = words(&start.command_line);
        assert!(
            words.contains("memory-backend-file") && words.contains("share=off,readonly=on,rom=off"),
            "{words}"
        );
    }
    assert_eq!(run(MemoryRequest::Copied, NEW, &[]).unwrap().memory, MemoryOrigin::Copied(None));
    assert_eq!(run(MemoryRequest::Postcopy, NEW, &[]).unwrap().memory, MemoryOrigin::Postcopy);
    let reason = |result: Result<PlannedGuests, Error>| match result.unwrap().memory {
        MemoryOrigin::Copied(Some(reason)) => reason,
        memory => panic!("{memory:?}"),
    };
    assert!(reason(run(any, old, &[])).contains("QEMU 7.2"));
    // One of a device is unchanged; one of a NUMA node must be in the image.
    let device = ["-object", "memory-backend-ram,id=more,size=8M"];
    assert_eq!(run(any, NEW, &device).unwrap().memory, MemoryOrigin::Mapped);
    let node = [&device[..], &["-numa", "node,memdev=more"]].concat();
    assert_eq!(reason(run(any, NEW, &node)), "the guest has no block of the memory backend more");
    let device = ["-chardev", "socket,id=c0,path=/nowhere", "-netdev", "vhost-user,id=n0,chardev=c0"];
    match run(MemoryRequest::Mapped, NEW, &device) {
        // The directory of temporary files has reflinks.
        Ok(planned) => assert_eq!(planned.memory, MemoryOrigin::Reflink),
        Err(error) => {
            let expected =
                "vhost-user devices share the guest's memory, which needs its own file: a reflink of";
            assert!(error.to_string().contains(expected), "{error:?}");
        }
    }
    assert!(matches!(run(MemoryRequest::Mapped, old, &[]), Err(Error::NotMapped { .. })));
}

#[cfg(feature = "store")]
mod of_store {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt as _, symlink};
    use std::sync::mpsc;

    use rustix::fs::{FlockOperation, flock};
    use towline_image::store::StoredImage;
    use towline_image::{Image, Location};

    use super::super::cache::{CacheFile, lock_exclusively};
    use super::*;

    /// Stores a synthetic guest of this size, in the place of another one.
    fn stored(directory: &Path, mib: u64) -> (Location, StoredImage) {
        let location: Location = format!("store:{}", directory.join("vm/web").display()).parse().unwrap();
        store(&Destination::Store(location.clone()), mib);
        let image = StoredImage::open(&location, None).unwrap();
        (location, image)
    }

    fn made(file: &CacheFile, image: &StoredImage) -> Result<PathBuf, Error> {
        in_context(|context| Ok(file.make(image, context)?.path().to_owned()))
    }

    fn found(file: &CacheFile, image: &StoredImage) -> Result<Option<PathBuf>, Error> {
        Ok(file.find(image.index(), &Silent)?.map(|file| file.path().to_owned()))
    }

    #[test]
    fn a_file_that_others_could_write_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (location, image) = stored(directory.path(), 8);
        let cache = directory.path().join("cache");
        let file = CacheFile::of(image.index(), &location, Some(&cache)).unwrap();
        assert_eq!(found(&file, &image).unwrap(), None);
        let path = made(&file, &image).unwrap();
        assert_eq!(found(&file, &image).unwrap(), Some(path.clone()));
        let refused = |mode: &str| {
            let error = found(&file, &image).unwrap_err();
            assert!(matches!(&error, Error::Cache { reason, .. } if reason.contains(mode)), "{error:?}");
            assert!(made(&file, &image).is_err());
        };
        for (of, mode, before) in [(&cache, 0o1777, 0o700), (&cache, 0o770, 0o700), (&path, 0o620, 0o600)] {
            fs::set_permissions(of, Permissions::from_mode(mode)).unwrap();
            refused(&format!("mode {mode:o}"));
            fs::set_permissions(of, Permissions::from_mode(before)).unwrap();
        }
        let other = directory.path().join("other.img");
        fs::rename(&path, &other).unwrap();
        symlink(&other, &path).unwrap();
        refused("is not a file");
    }

    #[test]
    fn an_image_that_is_replaced_while_it_is_read_has_no_file() {
        let directory = tempfile::tempdir().unwrap();
        let (location, image) = stored(directory.path(), 8);
        let cache = directory.path().join("cache");
        let file = CacheFile::of(image.index(), &location, Some(&cache)).unwrap();
        let (_, other) = stored(directory.path(), 16);
        let error = made(&file, &image).unwrap_err();
        assert!(error.to_string().contains("was replaced while it was read; try again"), "{error:?}");
        assert_eq!(found(&file, &image).unwrap(), None);
        let file = CacheFile::of(other.index(), &location, Some(&cache)).unwrap();
        let path = made(&file, &other).unwrap();
        assert!(Image::open(&path).unwrap().manifest_path().is_some());
        let left = fs::read_dir(&cache).unwrap().flatten().map(|entry| entry.path());
        let left: Vec<_> = left.filter(|path| path.extension().is_none_or(|of| of != "lock")).collect();
        // The image and its manifest.
        assert_eq!(left.len(), 2, "{left:?}");
        assert!(
            left.iter().all(|file| file.to_str().unwrap().starts_with(path.to_str().unwrap())),
            "{left:?}"
        );
    }

    #[test]
    fn a_wait_for_another_towline_ends_with_its_lock_or_with_a_cancellation() {
        let named = tempfile::NamedTempFile::new().unwrap();
        let holder = named.reopen().unwrap();
        flock(&holder, FlockOperation::LockExclusive).unwrap();
        let cancel = Cancel::new().unwrap();
        cancel.cancel();
        lock_exclusively(&named.reopen().unwrap(), &cancel, || {}).unwrap_err();
        let (awaits, awaited) = mpsc::channel();
        let waiter = std::thread::spawn({
            let file = named.reopen().unwrap();
            move || lock_exclusively(&file, &Cancel::new().unwrap(), || awaits.send(()).unwrap()).unwrap()
        });
        awaited.recv().unwrap();
        drop(holder);
        waiter.join().unwrap();
    }
}
