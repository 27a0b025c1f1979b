use clap::Parser;
use towline_launch::CommandLine;

use super::*;

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
        let names = names(&args(words), Path::new("/srv/guest.img")).unwrap();
        names.iter().map(ToString::to_string).collect()
    };
    assert_eq!(named(&["a.img"]), ["guest"]);
    assert_eq!(named(&["a.img", "--name", "web"]), ["web"]);
    assert_eq!(named(&["a.img", "--name", "web", "--count", "2"]), ["web-0", "web-1"]);
    let error = names(&args(&["a.img"]), Path::new("/srv/a b.img")).unwrap_err();
    assert!(error.exit == Exit::Usage && error.text.contains("--name"), "{error:?}");
}

#[test]
fn values_of_this_host_have_the_number_and_the_name_of_the_clone() {
    let args = args(&["a.img", "--set", "serial.0=unix:/run/{name}", "--", "-smbios", "type=1,serial={n}"]);
    let host = host(&args, 3, &"web-3".parse().unwrap()).unwrap();
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
        let host = host(&args, 0, &"a".parse().unwrap()).unwrap();
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
    let host = host(&args, 0, &"a".parse().unwrap()).unwrap();
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

/// An image of a synthetic guest, whose memory is one block.
fn image(directory: &Path) -> Image {
    use towline_channel::Cancel;
    use towline_control::plan::{self, Destination, Request};

    let path = directory.join("a.img");
    let source = "mem:8M".parse::<crate::endpoint::Endpoint>().unwrap().source().unwrap();
    let observer = crate::progress::Reporter::new(&crate::args::Output { json: false, quiet: true });
    let (request, cancel) = (Request::default(), Cancel::new().unwrap());
    plan::copy(&source, &Destination::Image(path.clone()), &request, &cancel, &observer).unwrap();
    Image::open(&path).unwrap()
}

#[test]
fn an_image_without_a_command_line_needs_arguments() {
    let directory = tempfile::tempdir().unwrap();
    let image = image(directory.path());
    let version = QemuVersion { major: 10, minor: 0 };
    let error = guests(&args(&["a.img"]), &image, version).unwrap_err();
    assert!(error.exit == Exit::Usage && error.text.contains("after --"), "{error:?}");
}

#[test]
fn memory_is_mapped_or_the_reason_is_said() {
    let directory = tempfile::tempdir().unwrap();
    let image = image(directory.path());
    let (new, old) = (QemuVersion { major: 10, minor: 0 }, QemuVersion { major: 7, minor: 2 });
    let name = &image.ram_blocks()[0].name;
    let backend = format!("memory-backend-ram,id={name},size=8M");
    let run = |options: &[&str], version, more: &[&str]| {
        let own = ["--", "-object", backend.as_str()];
        let line = ["a.img"].iter().chain(options).chain(&own).chain(more);
        guests(&args(&line.copied().collect::<Vec<_>>()), &image, version)
    };
    let (starts, memory) = run(&["--count", "2"], new, &[]).unwrap();
    assert_eq!(memory, Memory::Mapped);
    for start in &starts {
        let words = words(&start.command_line);
        assert!(
            words.contains("memory-backend-file") && words.contains("share=off,readonly=on,rom=off"),
            "{words}"
        );
    }
    assert_eq!(run(&["--copy"], new, &[]).unwrap().1, Memory::Copied(None));
    let reason = |result: Result<(Vec<GuestStart>, Memory), Rejection>| match result.unwrap().1 {
        Memory::Copied(Some(reason)) => reason,
        memory => panic!("{memory:?}"),
    };
    assert!(reason(run(&[], old, &[])).contains("QEMU 7.2"));
    let two = ["-object", "memory-backend-ram,id=more,size=8M"];
    assert_eq!(reason(run(&[], new, &two)), "the guest has 2 memory backends, expected one");
    let refused = run(&["--share"], old, &[]).unwrap_err();
    assert!(refused.exit == Exit::Failed && refused.text.contains("leave --share out"), "{refused:?}");
}
