use clap::Parser;
use towline_launch::CommandLine;

use super::*;
use crate::exit::Exit;

#[derive(Debug, Parser)]
struct Line {
    #[command(flatten)]
    args: RunArgs,
}

fn args(words: &[&str]) -> RunArgs {
    Line::try_parse_from(["run"].iter().chain(words)).unwrap().args
}

fn line(words: &str, host: &HostArguments) -> AllowedCommandLine {
    CommandLine::parse(words.split(' ')).unwrap().accept(host).unwrap()
}

fn recorded(words: &str) -> Recorded {
    CommandLine::parse(words.split(' ')).unwrap().record().unwrap()
}

fn words(command_line: &AllowedCommandLine) -> String {
    let words = command_line.to_arguments();
    words.iter().map(|word| word.to_str().unwrap()).collect::<Vec<_>>().join(" ")
}

#[test]
fn clones_are_numbered_and_one_guest_is_not() {
    let named = |words: &[&str]| -> Vec<String> {
        let names = names(&args(words), "guest").unwrap();
        names.iter().map(ToString::to_string).collect()
    };
    assert_eq!(named(&["a.img"]), ["guest"]);
    assert_eq!(named(&["a.img", "--name", "web"]), ["web"]);
    assert_eq!(named(&["a.img", "--name", "web", "--count", "2"]), ["web-0", "web-1"]);
    let error = names(&args(&["a.img"]), "a b").unwrap_err();
    assert!(error.exit == Exit::Usage && error.text.contains("--name"), "{error:?}");
}

#[test]
fn values_of_this_host_have_the_number_and_the_name_of_the_clone() {
    let args = args(&["a.img", "--set", "serial.0=unix:/run/{name}", "--", "-smbios", "type=1,serial={n}"]);
    let host = host(&args, None, 3, &"web-3".parse().unwrap()).unwrap();
    assert_eq!(host.settings[0].value, "unix:/run/web-3");
    assert_eq!(host.arguments, ["-smbios", "type=1,serial=3"]);
    // A guest's output is kept in a ring buffer, not in files of the runtime directory.
    assert_eq!(host.console_directory, None);
}

#[test]
fn hostile_command_line_is_refused_by_name_unless_it_is_trusted() {
    let recorded = recorded("-machine q35 -drive file=/etc/shadow,if=none,id=d0,format=raw -nodefaults");
    let allowed_by = |words: &[&str]| {
        let args = args(words);
        let host = host(&args, None, 0, &"a".parse().unwrap()).unwrap();
        allowed(&args, Some(&recorded), &host)
    };
    let error = allowed_by(&["a.img"]).unwrap_err().to_string();
    assert!(error.contains("drive.d0.file=/etc/shadow: comes from this host only"), "{error}");
    let set = ["a.img", "--set", "drive.d0.file=/srv/d0.raw", "--set", "drive.d0.format=raw"];
    assert!(words(&allowed_by(&set).unwrap()).contains("file=/srv/d0.raw"));
    assert!(words(&allowed_by(&["a.img", "--trust-command-line"]).unwrap()).contains("/etc/shadow"));
}

#[test]
fn arguments_of_the_user_are_the_whole_command_line_of_an_image_without_one() {
    let args = args(&["a.img", "--", "-m", "64M", "-monitor", "none"]);
    let host = host(&args, None, 0, &"a".parse().unwrap()).unwrap();
    let allowed = allowed(&args, None, &host).unwrap();
    assert_eq!(words(&allowed), "-m 64M -monitor none -display none");
}

#[test]
fn devices_of_other_processes_are_found() {
    let has = |words: &str| {
        line(words, &HostArguments::default()).command_line().options().iter().any(is_vhost_user)
    };
    assert!(has("-netdev vhost-user,id=n0,chardev=c0"));
    assert!(has("-device vhost-user-vsock-pci,chardev=c0"));
    assert!(!has("-netdev user,id=n0 -device virtio-net-pci,netdev=n0"));
}

#[test]
fn each_guest_gets_a_generation_id_and_an_overlay_of_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let image = opened(&image(directory.path()));
    let disk = directory.path().join("a.raw").display().to_string();
    let drive = format!("file={disk},format=raw,if=none,id=d0");
    let own = ["--", "-drive", &drive];
    let overlaid = |options: &[&str]| {
        let line = ["a.img", "--name", "web", "--count", "2", "--overlay"].iter().chain(options).chain(&own);
        guests(&args(&line.copied().collect::<Vec<_>>()), &image, Some(QemuVersion { major: 10, minor: 0 }))
    };
    let (starts, _) = overlaid(&[]).unwrap();
    for start in &starts {
        let [overlay] = start.overlays.as_slice() else { panic!("{:?}", start.overlays) };
        let path = directory.path().canonicalize().unwrap().join(format!("{}.d0.qcow2", start.name));
        assert_eq!((&overlay.path, overlay.base.as_str()), (&path, disk.as_str()));
        assert!(words(&start.command_line).contains("d0.qcow2,format=qcow2"), "{:?}", start.command_line);
    }
    let error = overlaid(&["--overlay-dir", "/nowhere"]).unwrap_err();
    assert!(
        error.exit == Exit::Failed && error.text.ends_with("choose another with --overlay-dir"),
        "{error:?}"
    );
    let recorded = recorded("-device vmgenid,guid=324e6eaf-d1d1-4bf6-bf41-b9bb6c91fb87");
    let args = args(&["a.img"]);
    let host = host(&args, Some(&recorded), 0, &"a".parse().unwrap()).unwrap();
    assert!(words(&allowed(&args, Some(&recorded), &host).unwrap()).contains("guid=auto"));
}

/// An image of a synthetic guest, whose memory is one block.
fn image(directory: &Path) -> std::path::PathBuf {
    use towline_channel::Cancel;
    use towline_control::plan::{self, CopyRequest, Destination};

    let path = directory.join("a.img");
    let source = "mem:8M".parse::<crate::endpoint::Endpoint>().unwrap().source().unwrap();
    let observer = crate::progress::Reporter::new(&crate::args::Output { json: false, quiet: true });
    let (request, cancel) = (CopyRequest::default(), Cancel::new().unwrap());
    plan::copy(&source, &Destination::Image(path.clone()), &request, &cancel, &observer).unwrap();
    path
}

fn opened(path: &Path) -> RunImage {
    let args = args(&[path.to_str().unwrap()]);
    let quiet = crate::args::Output { json: false, quiet: true };
    let cancel = towline_channel::Cancel::new().unwrap();
    RunImage::open_or_download(&args, &cancel, &crate::progress::Reporter::new(&quiet)).unwrap()
}

#[test]
fn an_image_without_a_command_line_needs_arguments() {
    let directory = tempfile::tempdir().unwrap();
    let image = opened(&image(directory.path()));
    let version = QemuVersion { major: 10, minor: 0 };
    let error = guests(&args(&["a.img"]), &image, Some(version)).unwrap_err();
    assert!(error.exit == Exit::Usage && error.text.contains("after --"), "{error:?}");
}

#[test]
fn memory_is_mapped_or_the_reason_is_said() {
    let directory = tempfile::tempdir().unwrap();
    let image = opened(&image(directory.path()));
    let (new, old) = (QemuVersion { major: 10, minor: 0 }, QemuVersion { major: 7, minor: 2 });
    let name = &image.file().unwrap().ram_blocks()[0].name;
    let backend = format!("memory-backend-ram,id={name},size=8M");
    let machine = format!("q35,memory-backend={name}");
    let run = |options: &[&str], version, more: &[&str]| {
        let own = ["--", "-machine", &machine, "-object", backend.as_str()];
        let line = ["a.img"].iter().chain(options).chain(&own).chain(more);
        guests(&args(&line.copied().collect::<Vec<_>>()), &image, Some(version))
    };
    let (starts, memory) = run(&["--count", "2"], new, &[]).unwrap();
    assert_eq!(memory, MemoryOrigin::Mapped);
    for start in &starts {
        let words = words(&start.command_line);
        assert!(
            words.contains("memory-backend-file") && words.contains("share=off,readonly=on,rom=off"),
            "{words}"
        );
    }
    assert_eq!(run(&["--copy"], new, &[]).unwrap().1, MemoryOrigin::Copied(None));
    assert_eq!(run(&["--postcopy"], new, &[]).unwrap().1, MemoryOrigin::Postcopy);
    let reason = |result: Result<(Vec<GuestStart>, MemoryOrigin), Rejection>| match result.unwrap().1 {
        MemoryOrigin::Copied(Some(reason)) => reason,
        memory => panic!("{memory:?}"),
    };
    assert!(reason(run(&[], old, &[])).contains("QEMU 7.2"));
    // One of a device stays as it is; one of a NUMA node has to be in the image.
    let device = ["-object", "memory-backend-ram,id=more,size=8M"];
    assert_eq!(run(&[], new, &device).unwrap().1, MemoryOrigin::Mapped);
    let node = [&device[..], &["-numa", "node,memdev=more"]].concat();
    assert_eq!(reason(run(&[], new, &node)), "the image has no block of the memory backend more");
    let device = ["-chardev", "socket,id=c0,path=/nowhere", "-netdev", "vhost-user,id=n0,chardev=c0"];
    match run(&["--share"], new, &device) {
        // The directory of temporary files has reflinks.
        Ok((_, memory)) => assert_eq!(memory, MemoryOrigin::Reflink),
        Err(refused) => {
            let expected =
                "vhost-user devices share the guest's memory, which needs a file of its own: a reflink of";
            assert!(refused.text.contains(expected), "{refused:?}");
        }
    }
    let refused = run(&["--share"], old, &[]).unwrap_err();
    assert!(refused.exit == Exit::Failed && refused.text.contains("leave --share out"), "{refused:?}");
}

#[cfg(feature = "store")]
mod of_store {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use towline_channel::Cancel;
    use towline_control::plan::{self, CopyRequest, Destination};
    use towline_image::store::StoredImage;
    use towline_image::{Image, Location};

    use super::super::super::materialised::Materialised;
    use super::*;
    use crate::endpoint::Endpoint;
    use crate::progress::Reporter;

    fn reporter() -> Reporter {
        Reporter::new(&crate::args::Output { json: false, quiet: true })
    }

    /// Stores a synthetic guest of this size, in the place of another one.
    fn stored(directory: &Path, size: &str) -> (Location, StoredImage) {
        let text = format!("store:{}", directory.join("vm/web").display());
        let Endpoint::Store(location) = text.parse().unwrap() else { panic!("{text}") };
        let source = format!("mem:{size}").parse::<Endpoint>().unwrap().source().unwrap();
        let request = CopyRequest { overwrite: true, ..CopyRequest::default() };
        let (to, cancel) = (Destination::Store(location.clone()), Cancel::new().unwrap());
        plan::copy(&source, &to, &request, &cancel, &reporter()).unwrap();
        let image = StoredImage::open(&location, None).unwrap();
        (location, image)
    }

    fn made(file: &Materialised<'_>, image: &StoredImage) -> Result<std::path::PathBuf, Rejection> {
        let made = file.make(image, &Cancel::new().unwrap(), &reporter())?;
        Ok(made.path().to_owned())
    }

    fn found(file: &Materialised<'_>) -> Result<Option<std::path::PathBuf>, Rejection> {
        Ok(file.find(&reporter())?.map(|file| file.path().to_owned()))
    }

    #[test]
    fn a_file_that_others_could_write_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (location, image) = stored(directory.path(), "8M");
        let cache = directory.path().join("cache");
        let file = Materialised::of(image.index(), &location, Some(&cache)).unwrap();
        assert_eq!(found(&file).unwrap(), None);
        let path = made(&file, &image).unwrap();
        assert_eq!(found(&file).unwrap(), Some(path.clone()));
        let refused = |mode: &str| {
            let text = found(&file).unwrap_err().text;
            assert!(text.contains(mode) && text.contains("--cache-dir"), "{text}");
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
        let (location, image) = stored(directory.path(), "8M");
        let cache = directory.path().join("cache");
        let file = Materialised::of(image.index(), &location, Some(&cache)).unwrap();
        let (_, other) = stored(directory.path(), "16M");
        let error = made(&file, &image).unwrap_err();
        assert!(error.text.contains("was replaced while it was read; try again"), "{error:?}");
        assert_eq!(found(&file).unwrap(), None);
        let file = Materialised::of(other.index(), &location, Some(&cache)).unwrap();
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
}
