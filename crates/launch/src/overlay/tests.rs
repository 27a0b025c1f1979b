use super::*;

fn guest(words: &str) -> AllowedCommandLine {
    CommandLine::parse(words.split(' ')).unwrap().accept(&HostArguments::default()).unwrap()
}

fn of_user(words: &str) -> AllowedCommandLine {
    let arguments = words.split_whitespace().map(Into::into).collect();
    let host = HostArguments { arguments, ..HostArguments::default() };
    CommandLine::default().accept(&host).unwrap()
}

fn overlaid(mut guest: AllowedCommandLine, directory: &Path) -> Result<(String, Vec<Overlay>), OverlayError> {
    let name = "web-0".parse().unwrap();
    let plan = OverlayPlan { guest: &name, directory, working_directory: Path::new("/srv") };
    let overlays = guest.use_overlays(&plan)?;
    let words: Vec<_> = guest.to_arguments().iter().map(|word| word.to_str().unwrap().to_owned()).collect();
    Ok((words.join(" "), overlays))
}

#[test]
fn drives_that_are_written_get_an_overlay() {
    let words = "-drive file=a.raw,format=raw,if=none,id=d0 -drive file=/b,format=raw,readonly=on \
                 -drive file=/c.iso,format=raw,media=cdrom -drive if=none,id=empty -S";
    for guest in [guest(words), of_user(words)] {
        let (words, overlays) = overlaid(guest, Path::new("/o")).unwrap();
        let expected = Overlay {
            setting: "drive.d0".into(),
            base: "/srv/a.raw".into(),
            format: "raw".into(),
            path: "/o/web-0.d0.qcow2".into(),
        };
        assert_eq!(overlays, [expected]);
        assert!(
            words.contains("-drive file=/o/web-0.d0.qcow2,format=qcow2,if=none,id=d0 -drive file=/b"),
            "{words}"
        );
    }
}

#[test]
fn nodes_with_a_format_get_an_overlay() {
    let words = r#"-blockdev {"driver":"file","filename":"/srv/a.qcow2","node-name":"s0"} -blockdev {"driver":"qcow2","file":"s0","node-name":"f0","backing":null,"read-only":false} -blockdev driver=raw,node-name=f1,file.driver=file,file.filename=/srv/b.raw"#;
    let (words, overlays) = overlaid(guest(words), Path::new("/o")).unwrap();
    let bases: Vec<_> =
        overlays.iter().map(|overlay| (overlay.base.as_str(), overlay.format.as_str())).collect();
    assert_eq!(bases, [("/srv/a.qcow2", "qcow2"), ("/srv/b.raw", "raw")]);
    assert!(words.contains(r#""filename":"/o/web-0.f0.qcow2""#) && !words.contains("backing"), "{words}");
    assert!(
        words.contains("-blockdev qcow2,node-name=f1,file.driver=file,file.filename=/o/web-0.f1.qcow2"),
        "{words}"
    );
}

#[test]
fn disks_that_cannot_have_one_are_refused_by_name() {
    let error = |words: &str| overlaid(of_user(words), Path::new("/o")).map(|_| ()).unwrap_err().to_string();
    assert_eq!(
        error("-drive file=/a,if=none,id=d0"),
        "disk drive.d0: no overlay is possible without its format; set drive.d0.format"
    );
    assert!(
        error("-hda /a").starts_with("disk hda: no overlay is possible for -hda"),
        "{}",
        error("-hda /a")
    );
    let nested = r#"-blockdev {"driver":"qcow2","node-name":"f0","file":{"driver":"file","filename":"/a"}}"#;
    assert!(error(nested).starts_with("disk blockdev.f0: no overlay is possible for a node"));
}

#[test]
fn urls_are_not_paths() {
    assert_eq!(absolute("nbd://host/disk", Path::new("/w")), "nbd://host/disk");
    assert_eq!(absolute("a/b:c", Path::new("/w")), "/w/a/b:c");
    assert_eq!(absolute("/a", Path::new("/w")), "/a");
}

#[test]
fn files_that_exist_and_directories_that_do_not_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let overlay =
        |path: PathBuf| Overlay { setting: "drive.d0".into(), base: "/a".into(), format: "raw".into(), path };
    let free = overlay(directory.path().join("free.qcow2"));
    Overlay::check(std::slice::from_ref(&free)).unwrap();
    let taken = overlay(directory.path().join("taken.qcow2"));
    fs::write(&taken.path, "").unwrap();
    assert!(matches!(Overlay::check(&[free.clone(), taken]), Err(OverlayError::Exists { .. })));
    let missing = overlay(directory.path().join("missing/a.qcow2"));
    assert!(matches!(Overlay::check(&[missing]), Err(OverlayError::Directory { .. })));
    // More overlays than there is room for, even if others free space before the check.
    let statistics = statvfs(directory.path()).unwrap();
    let count = (2 * statistics.f_bavail * statistics.f_frsize / ROOM_BYTES + 1) as usize;
    let error = Overlay::check(&vec![free; count]).unwrap_err().to_string();
    assert!(error.contains("MiB free, expected"));
}

#[test]
fn an_overlay_is_removed_unless_it_is_kept() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.qcow2");
    fs::write(&path, "").unwrap();
    let created = || CreatedDisk { path: Some(path.clone()), file: fs::File::open(&path).unwrap() };
    created().keep();
    assert!(path.exists());
    drop(created());
    assert!(!path.exists());
}

fn refused(mut guest: AllowedCommandLine) -> Option<String> {
    let name = "web".parse().unwrap();
    let plan = OverlayPlan { guest: &name, directory: Path::new("/o"), working_directory: Path::new("/") };
    guest.use_overlays(&plan).err().map(|error| error.to_string())
}

#[test]
fn nodes_that_a_guest_writes_without_an_overlay_are_refused() {
    for words in [
        "-blockdev driver=file,node-name=d0,filename=/a -device virtio-blk-pci,drive=d0",
        "-blockdev driver=host_device,node-name=d0,filename=/dev/sdb",
        "-blockdev driver=nbd,node-name=d0,server.type=unix,server.path=/run/nbd",
        "-blockdev driver=rbd,node-name=d0,pool=a,image=b",
        "-blockdev driver=luks,node-name=d0,file.driver=file,file.filename=/a",
        "-blockdev driver=throttle,node-name=d0,file.driver=file,file.filename=/a",
        "-blockdev driver=throttle,node-name=t0,file=d0 -blockdev driver=file,node-name=d0,filename=/a",
        // Read-only for its own device, and writable for another one.
        "-blockdev driver=file,node-name=d0,filename=/a -blockdev driver=raw,node-name=f0,file=d0,read-only=on -device virtio-blk-pci,drive=d0",
        "-drive file.driver=nbd,file.host=h,if=none,id=d0",
        "-drive driver=nbd,host=h,if=none,id=d0",
        "-drive driver=host_device,filename=/dev/sdb,if=none,id=d0",
        "-drive file.filename=/a,file.driver=luks,format=raw,if=none,id=d0",
    ] {
        let error = refused(of_user(words));
        assert!(
            error.as_ref().is_some_and(|error| error.contains(".d0: no overlay is possible for a ")),
            "{words}: {error:?}"
        );
    }
    for words in [
        "-blockdev driver=file,node-name=d0,filename=/a,read-only=on",
        "-blockdev driver=file,node-name=d0,filename=/a,auto-read-only=on -blockdev driver=raw,node-name=f0,file=d0,read-only=on",
        "-blockdev driver=null-co,node-name=d0,size=1M -drive driver=null-co,if=none,id=d1",
        "-blockdev driver=file,node-name=d0,filename=/a -blockdev driver=raw,node-name=f0,file=d0 -blockdev driver=throttle,node-name=t0,file=f0",
    ] {
        assert_eq!(refused(of_user(words)), None, "{words}");
    }
}

#[test]
fn overlays_of_host_devices_are_files() {
    let words = "-blockdev driver=host_device,node-name=s0,filename=/dev/sdb -blockdev driver=raw,node-name=f0,file=s0 \
                 -drive file.driver=host_device,file.filename=/dev/sdc,format=raw,if=none,id=d0";
    let (words, overlays) = overlaid(of_user(words), Path::new("/o")).unwrap();
    assert_eq!(overlays.len(), 2);
    assert!(!words.contains("host_device") && words.contains("filename=/o/web-0.f0.qcow2"), "{words}");
}

/// A directory with a QEMU and this program as its `qemu-img`.
fn tools(program: &str) -> (tempfile::TempDir, HostArguments) {
    let directory = tempfile::tempdir().unwrap();
    std::os::unix::fs::symlink(program, directory.path().join(TOOL)).unwrap();
    let host = HostArguments { binary: directory.path().join("qemu"), ..HostArguments::default() };
    (directory, host)
}

fn in_directory(directory: &Path) -> Overlay {
    let path = directory.join("a.qcow2");
    Overlay { setting: "drive.d0".into(), base: "/a".into(), format: "raw".into(), path }
}

#[test]
fn a_file_that_appears_after_the_check_is_not_touched() {
    let (directory, host) = tools("/bin/true");
    let overlay = in_directory(directory.path());
    fs::write(&overlay.path, "of another guest").unwrap();
    assert!(matches!(overlay.create(&host), Err(OverlayError::Exists { .. })));
    assert_eq!(fs::read(&overlay.path).unwrap(), b"of another guest");
    fs::remove_file(&overlay.path).unwrap();
    let target = directory.path().join("target");
    std::os::unix::fs::symlink(&target, &overlay.path).unwrap();
    assert!(matches!(overlay.create(&host), Err(OverlayError::Exists { .. })));
    assert!(!target.exists() && overlay.path.is_symlink());
}

#[test]
fn an_overlay_is_its_owners_alone_and_removed_if_it_is_not_made() {
    let (directory, host) = tools("/bin/true");
    let overlay = in_directory(directory.path());
    let made = overlay.create(&host).unwrap();
    assert_eq!(fs::metadata(&overlay.path).unwrap().mode() & 0o777, 0o600);
    drop(made);
    assert!(!overlay.path.exists());
    let (directory, host) = tools("/bin/false");
    let overlay = in_directory(directory.path());
    assert!(matches!(overlay.create(&host), Err(OverlayError::NotMade { .. })));
    assert!(!overlay.path.exists());
}

#[test]
fn the_tool_beside_a_relative_qemu_is_found_from_any_directory() {
    let (directory, _) = tools("/bin/true");
    let up = std::env::current_dir().unwrap().components().map(|_| "..").collect::<PathBuf>();
    let relative = up.join(directory.path().strip_prefix("/").unwrap()).join("qemu");
    let found = tool(&relative);
    assert!(found.is_absolute() && found.is_file(), "{}", found.display());
    assert_eq!(tool(Path::new("qemu-system-x86_64")), Path::new(TOOL));
}
