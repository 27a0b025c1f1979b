use std::os::unix::process::ExitStatusExt as _;
use std::thread;

use rustix::process::Pid;

use super::*;
use crate::host::EnvironmentVariable;
use crate::runtime::RuntimeRoot;

/// A program in QEMU's place that reports what it was given and ends.
fn start(script: &str, change: impl FnOnce(&mut Launcher)) -> LaunchError {
    let parent = tempfile::tempdir().unwrap();
    let binary = parent.path().join("qemu");
    // A program cannot be executed while a process that another test is starting has it open for writing, as has this one.
    let write = "printf '#!/bin/sh\n%s\n' \"$1\" > \"$0\"; chmod 700 \"$0\"";
    assert!(Command::new("sh").args(["-c", write]).arg(&binary).arg(script).status().unwrap().success());
    let root = RuntimeRoot::at(parent.path().join("run"));
    let mut launcher = Launcher::new(root.claim(&"web".parse().unwrap()).unwrap());
    change(&mut launcher);
    let environment = vec![EnvironmentVariable { name: "OF_HOST".into(), value: "1".into() }];
    let host = HostArguments { binary, environment, ..HostArguments::default() };
    let guest = CommandLine::parse(["-machine", "q35"]).unwrap().trust(&host).unwrap();
    let error = launcher.start(&guest, &host).unwrap_err();
    assert!(!root.path().join("web").exists(), "nothing remains");
    error
}

fn log(error: &LaunchError) -> &str {
    match error {
        LaunchError::Exited { log, .. } => log,
        other => panic!("{other}"),
    }
}

#[test]
fn last_lines_of_a_process_that_ends_are_shown() {
    let error = start("seq 1 20; printf 'qemu: \\033[1mno\\n' >&2; exit 3", |_| {});
    assert_eq!(log(&error), "12\n13\n14\n15\n16\n17\n18\n19\n20\nqemu: ?[1mno");
    assert!(error.to_string().contains("ended at its start (exit status: 3): 12\n"), "{error}");
    assert_eq!(log(&start("exit 1", |_| {})), "no message");
}

/// A QEMU whose owner is killed at any moment can be found.
#[test]
fn the_state_is_written_before_the_program_begins() {
    let script = "[ -s \"${0%/*}/run/web/state.json\" ] && echo found || echo missing; exit 1";
    for lifetime in [Lifetime::WithOwner, Lifetime::Detached] {
        assert_eq!(log(&start(script, |launcher| launcher.lifetime = lifetime)), "found");
    }
}

#[test]
fn own_options_precede_the_guests() {
    let error = start("echo \"$@\"; exit 1", |launcher| {
        launcher.incoming = IncomingOption::Defer;
        launcher.is_paused = true;
    });
    let words: Vec<&str> = log(&error).split(' ').map(|word| word.split("fd=").next().unwrap()).collect();
    assert_eq!(
        words.join(" "),
        "-sandbox on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny -chardev socket,id=towline-qmp, \
         -mon chardev=towline-qmp,mode=control -monitor none -incoming defer -S -machine q35 -display none -name guest=web,debug-threads=on"
    );
}

#[test]
fn human_monitor_is_the_hosts() {
    let parent = tempfile::tempdir().unwrap();
    let root = RuntimeRoot::at(parent.path().join("run"));
    let launcher = Launcher::new(root.claim(&"web".parse().unwrap()).unwrap());
    let listener = launcher.listen().unwrap();
    let monitors = |arguments: &[&str]| {
        let arguments = arguments.iter().map(OsString::from).collect();
        let host = HostArguments { arguments, ..HostArguments::default() };
        let guest = CommandLine::default().trust(&host).unwrap();
        let words = launcher.arguments(&guest, &host, listener.as_fd());
        let pairs = words.windows(2).filter(|pair| pair[0] == "-monitor");
        pairs.map(|pair| pair[1].to_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(monitors(&[]), ["none"]);
    assert_eq!(monitors(&["-monitor", "stdio"]), ["stdio"]);
    assert_eq!(monitors(&["-monitor", "none"]), ["none"]);
}

#[test]
fn only_the_end_of_a_log_is_read() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("qemu.log");
    let mut log = fs::File::create(&path).unwrap();
    // More than this host has memory; it is a hole.
    log.set_len(1 << 40).unwrap();
    io::Seek::seek(&mut log, io::SeekFrom::End(0)).unwrap();
    io::Write::write_all(&mut log, b"\nqemu: the end\n").unwrap();
    let read = read_end(&fs::File::open(&path).unwrap()).unwrap();
    assert_eq!(read.len(), LOG_BYTES_MAX);
    assert!(log_tail(&path).ends_with("\nqemu: the end"));
    assert_eq!(log_tail(&parent.path().join("missing")), "no message");
}

#[test]
fn relative_paths_are_those_of_the_working_directory() {
    let directory = tempfile::tempdir().unwrap();
    let canonical = directory.path().canonicalize().unwrap();
    let parent = tempfile::tempdir().unwrap();
    let root = RuntimeRoot::at(parent.path().join("run"));
    let mut launcher = Launcher::new(root.claim(&"web".parse().unwrap()).unwrap());
    let host = HostArguments {
        binary: "/bin/true".into(),
        working_directory: Some(canonical.clone()),
        ..HostArguments::default()
    };
    let guest = CommandLine::default().trust(&host).unwrap();
    let ToSpawn { command, .. } = launcher.prepare(&guest, &host).unwrap();
    assert_eq!(command.get_current_dir(), Some(canonical.as_path()));
}

#[test]
fn environment_and_descriptors_are_only_those_that_are_given() {
    // Any descriptor that is not closed on execution would be inherited.
    let leaked = fs::File::open("/dev/null").unwrap();
    rustix::io::fcntl_setfd(&leaked, rustix::io::FdFlags::empty()).unwrap();
    let given = fs::File::open("/dev/zero").unwrap();
    let error = start(
        "env | grep -v -e ^PWD= -e ^OLDPWD= -e ^_= -e ^SHLVL= | cut -d= -f1 | sort; pwd; readlink /proc/$$/fd/* | grep /dev/ | sort; exit 1",
        |launcher| launcher.descriptors.push(given.into()),
    );
    let lines: Vec<&str> = log(&error).lines().collect();
    let is_expected =
        |line: &&&str| line.starts_with('/') || INHERITED.contains(*line) || **line == "OF_HOST";
    assert_eq!(lines.iter().filter(is_expected).count(), lines.len(), "{lines:?}");
    assert!(lines.contains(&"OF_HOST") && lines.contains(&"/") && lines.contains(&"/dev/zero"), "{lines:?}");
    // Its standard input is one.
    assert_eq!(lines.iter().filter(|line| **line == "/dev/null").count(), 1, "{lines:?}");
}

#[test]
fn a_process_that_does_not_answer_is_killed_at_the_deadline() {
    let error = start("echo $$; kill -STOP $$", |launcher| {
        launcher.start_timeout = Duration::from_millis(300);
    });
    let LaunchError::NotReady { log, .. } = &error else { panic!("{error}") };
    assert!(!Path::new("/proc").join(log).exists(), "{error}");
}

#[test]
fn a_program_that_is_missing_is_an_error() {
    let parent = tempfile::tempdir().unwrap();
    let root = RuntimeRoot::at(parent.path().join("run"));
    let launcher = Launcher::new(root.claim(&"web".parse().unwrap()).unwrap());
    let host = HostArguments { binary: "/nowhere/qemu".into(), ..HostArguments::default() };
    let guest = CommandLine::default().trust(&host).unwrap();
    let error = launcher.start(&guest, &host).unwrap_err().to_string();
    assert_eq!(error, "QEMU /nowhere/qemu cannot be started: No such file or directory (os error 2)");
    assert_eq!(fs::read_dir(root.path()).unwrap().count(), 0);
    // Those of other tests are reaped soon.
    let deadline = Instant::now() + Duration::from_secs(30);
    while has_zombie() {
        assert!(Instant::now() < deadline, "no process remains");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Returns true if a child of this process has ended and was not waited for.
fn has_zombie() -> bool {
    let own = std::process::id().to_string();
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let stats = processes.filter_map(|process| fs::read_to_string(process.path().join("stat")).ok());
    let is_zombie = |stat: String| {
        let mut fields = stat.rsplit_once(") ").unwrap().1.split(' ');
        fields.next() == Some("Z") && fields.next() == Some(own.as_str())
    };
    stats.into_iter().any(is_zombie)
}

#[test]
fn a_process_that_is_killed_before_it_is_qemu_has_a_status() {
    let parent = tempfile::tempdir().unwrap();
    let root = RuntimeRoot::at(parent.path().join("run"));
    let mut launcher = Launcher::new(root.claim(&"web".parse().unwrap()).unwrap());
    let host = HostArguments { binary: "/bin/true".into(), ..HostArguments::default() };
    let process = launcher.prepare(&CommandLine::default().trust(&host).unwrap(), &host).unwrap();
    let killed = |pid: u32| {
        rustix::process::kill_process(Pid::from_raw(pid.cast_signed()).unwrap(), Signal::KILL).unwrap();
        // Its end of the gate is closed.
        while fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z ")) {
            thread::yield_now();
        }
        true
    };
    let spawned = spawn(process, killed).unwrap();
    assert_eq!(spawned.exit.wait(Duration::from_secs(60)).unwrap().signal(), Some(9));
}

#[test]
fn the_version_is_read_from_the_first_line() {
    let version = |major, minor| Some(QemuVersion { major, minor });
    assert_eq!(
        parse_version("QEMU emulator version 10.0.2 (Debian 1:10.0.2+ds-2)\nCopyright"),
        version(10, 0)
    );
    assert_eq!(parse_version("QEMU emulator version 8.2\n"), version(8, 2));
    assert_eq!(parse_version("cat (GNU coreutils) 9.1\n"), None);
    assert_eq!(parse_version("version x.1"), None);
}

#[test]
fn the_state_is_there_before_the_monitor_answers() {
    let error = start(
        "state=${0%/*}/run/web/state.json; for i in $(seq 500); do [ -e $state ] && { cat $state; exit 1; }; sleep 0.01; done; exit 1",
        |launcher| launcher.lifetime = Lifetime::Detached,
    );
    assert!(log(&error).contains(r#""detached":true"#), "{error}");
}
