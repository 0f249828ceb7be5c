//! Compiles `csrc/*.cu` with nvcc and hands the images to the crate as aligned byte slices.
//!
//! `KVWEAVE_CUDA` chooses: `off` builds without kernels, `auto` (default) builds them when an nvcc
//! is found and warns otherwise, `require` makes a missing nvcc an error. No GPU is needed.
//!
//! An image is compiled again only when the bytes it is made of change (sources, headers, flags,
//! nvcc version); the stamp beside it remembers them, so touching a file costs nothing.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::thread;

/// Native code for A100 and H100/H200, and PTX that newer drivers compile for anything later.
const FLAGS: &[&str] = &[
    "-fatbin",
    "-std=c++17",
    "-O3",
    "-Werror=all-warnings",
    "-gencode=arch=compute_80,code=sm_80",
    "-gencode=arch=compute_90a,code=sm_90a",
    "-gencode=arch=compute_80,code=compute_80",
];

fn main() -> ExitCode {
    for name in ["KVWEAVE_CUDA", "NVCC", "PYO3_PYTHON", "CUDA_HOME", "PATH"] {
        println!("cargo::rerun-if-env-changed={name}");
    }
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            println!("cargo::error={why}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let root = workspace_root();
    let csrc = root.join("csrc");
    println!("cargo::rerun-if-changed={}", csrc.display());
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set by cargo")?);
    let choice = env::var("KVWEAVE_CUDA").unwrap_or_else(|_| "auto".into());
    if !["off", "auto", "require"].contains(&choice.as_str()) {
        return Err(format!("KVWEAVE_CUDA: expected off, auto or require, got {choice:?}"));
    }
    if choice == "off" {
        return write_module(&out, &[], "built with KVWEAVE_CUDA=off");
    }
    let built = find_nvcc(&root).and_then(|nvcc| compile_all(&nvcc, &csrc, &out));
    match built {
        Ok(names) => write_module(&out, &names, ""),
        Err(why) if choice == "require" => Err(why),
        Err(why) => {
            println!("cargo::warning=building without CUDA kernels: {why}");
            write_module(&out, &[], &why)
        }
    }
}

fn workspace_root() -> PathBuf {
    let manifest = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    manifest.ancestors().nth(2).map(Path::to_path_buf).unwrap_or(manifest)
}

/// Looks where an nvcc can be, the most deliberate choice first.
fn find_nvcc(root: &Path) -> Result<PathBuf, String> {
    if let Some(path) = env::var_os("NVCC") {
        let path = PathBuf::from(path);
        let got = path.display().to_string();
        return if path.is_file() { Ok(path) } else { Err(format!("NVCC is not a file: {got}")) };
    }
    let mut roots = toolchain_roots(&root.join(".toolchain"));
    roots.extend(interpreter_roots());
    roots.extend(env::var_os("CUDA_HOME").map(PathBuf::from));
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).map(|folder| folder.join("nvcc"));
    roots
        .iter()
        .map(|root| root.join("bin").join("nvcc"))
        .chain(on_path)
        .find(|nvcc| nvcc.is_file())
        .ok_or_else(|| {
            "no nvcc in NVCC, .toolchain, the build interpreter's nvidia packages, CUDA_HOME or \
             PATH (pip install 'nvidia-cuda-nvcc==13.0.*' and its companions in pyproject.toml)"
                .into()
        })
}

/// `nvidia/cu*` folders of an environment that holds only the toolchain packages.
fn toolchain_roots(environment: &Path) -> Vec<PathBuf> {
    children(&environment.join("lib"))
        .into_iter()
        .flat_map(|python| children(&python.join("site-packages").join("nvidia")))
        .collect()
}

/// `nvidia/cu*` folders of the interpreter that maturin builds for: in an isolated build these are
/// the packages named in `[build-system].requires`.
fn interpreter_roots() -> Vec<PathBuf> {
    let code = "import importlib.util as u; s = u.find_spec('nvidia'); \
                print('\\n'.join(s.submodule_search_locations) if s else '')";
    let Some(python) = env::var_os("PYO3_PYTHON") else { return Vec::new() };
    let Ok(output) = Command::new(python).args(["-c", code]).output() else { return Vec::new() };
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().flat_map(|folder| children(Path::new(folder))).collect()
}

fn children(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    paths.sort();
    paths
}

/// Compiles every `.cu` on its own thread; returns their basenames.
fn compile_all(nvcc: &Path, csrc: &Path, out: &Path) -> Result<Vec<String>, String> {
    let version = Command::new(nvcc)
        .arg("--version")
        .output()
        .map_err(|error| format!("{} does not run: {error}", nvcc.display()))?;
    let files = children(csrc);
    let has = |path: &&PathBuf, kinds: &[&str]| {
        path.extension().is_some_and(|kind| kinds.iter().any(|wanted| kind == *wanted))
    };
    let mut shared = version.stdout;
    shared.extend(FLAGS.join(" ").bytes());
    for header in files.iter().filter(|path| has(path, &["h", "cuh"])) {
        shared.extend(read(header)?);
    }
    let sources: Vec<&PathBuf> = files.iter().filter(|path| has(path, &["cu"])).collect();
    let shared = &shared;
    thread::scope(|scope| {
        let jobs: Vec<_> = sources
            .into_iter()
            .map(|source| scope.spawn(move || compile(nvcc, source, shared, out)))
            .collect();
        jobs.into_iter()
            .map(|job| job.join().unwrap_or_else(|_| Err("a compile thread panicked".into())))
            .collect()
    })
}

fn compile(nvcc: &Path, source: &Path, shared: &[u8], out: &Path) -> Result<String, String> {
    let name = source.file_stem().unwrap_or_default().to_string_lossy().into_owned();
    let image = out.join(format!("{name}.fatbin"));
    let stamp = out.join(format!("{name}.stamp"));
    let mut content = read(source)?;
    content.extend(shared);
    let wanted = format!("{:016x}", fnv1a(&content));
    if image.is_file() && fs::read_to_string(&stamp).is_ok_and(|old| old == wanted) {
        return Ok(name);
    }
    let output = Command::new(nvcc)
        .args(FLAGS)
        .arg("-o")
        .arg(&image)
        .arg(source)
        .output()
        .map_err(|error| format!("{} does not run: {error}", nvcc.display()))?;
    if !output.status.success() {
        let text = String::from_utf8_lossy(&output.stderr).replace('\n', " | ");
        return Err(format!("nvcc rejected {name}.cu: {text}"));
    }
    fs::write(&stamp, wanted).map_err(|error| format!("{}: {error}", stamp.display()))?;
    Ok(name)
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    fs::read(path).map_err(|error| format!("{}: {error}", path.display()))
}

/// FNV-1a, 64 bits: enough to notice an edit, and no dependency.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Writes the module that `images.rs` includes: one aligned static per kernel file.
fn write_module(out: &Path, names: &[String], why_absent: &str) -> Result<(), String> {
    let mut text = format!("pub(crate) const WHY_ABSENT: &str = {why_absent:?};\n");
    let find = |name: &str| names.iter().any(|built| built == name);
    text.push_str("pub(crate) static COPY_REROTATE: Option<&Image<[u8]>> = ");
    text.push_str(if find("copy_rerotate") {
        "Some(&Image(*include_bytes!(concat!(env!(\"OUT_DIR\"), \"/copy_rerotate.fatbin\"))));\n"
    } else {
        "None;\n"
    });
    let path = out.join("images.rs");
    fs::write(&path, text).map_err(|error| format!("{}: {error}", path.display()))
}
