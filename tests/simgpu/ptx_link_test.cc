#include "simgpu/driver/ptx_link.h"

#include <catch2/catch.hpp>
#include <string>

using simgpu::KernelNames;
using simgpu::LinkPtx;

namespace {

constexpr char kCaller[] = R"(
.version 8.0
.target sm_75
.address_size 64
	// a comment with .entry fake( in it
.extern .func  (.param .b32 func_retval0) add(.param .b32 add_param_0, .param .b32 add_param_1);
.extern .global .align 4 .u32 counter;
.extern .shared .align 16 .b8 dynamic[];
.global .align 1 .b8 $str[6] = {104, 101, 59, 125, 123, 0};
.visible .entry first(.param .u64 first_param_0)
.maxntid 128, 1, 1
{
	.reg .b32 %r<3>;
	mov.u64 %rd1, $str;
	call (retval0), add, (a, b);
	ret;
}
)";

constexpr char kCallee[] = R"(
.version 9.0
.target sm_80
.address_size 64
.visible .global .align 4 .u32 counter = 5;
.global .align 1 .b8 $str[3] = {1, 2, 0};
.extern .shared .align 16 .b8 dynamic[];
.weak .func helper() { ret; }
.visible .func (.param .b32 func_retval0) add(.param .b32 p0, .param .b32 p1)
{
	mov.u64 %rd1, $str;
	mov.u64 %rd2, $strange;
	st.param.b32 [func_retval0], %r1;
	ret;
}
.visible .entry second() { ret; }
)";

size_t Count(const std::string& text, const std::string& word) {
  size_t count = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) ++count;
  return count;
}

}  // namespace

TEST_CASE("the kernels of a text are its entry definitions", "[simgpu][ptx]") {
  CHECK(KernelNames(kCaller) == std::vector<std::string>{"first"});
  CHECK(KernelNames(kCallee) == std::vector<std::string>{"second"});
  CHECK(KernelNames("").empty());
  CHECK(KernelNames(".visible .entry cut(.param").empty());
}

TEST_CASE("texts are joined: externs go, local names are kept apart", "[simgpu][ptx]") {
  std::string linked;
  std::string error;
  REQUIRE(LinkPtx({kCaller, kCallee}, &linked, &error));
  CHECK(KernelNames(linked) == std::vector<std::string>{"first", "second"});
  CHECK(Count(linked, ".version") == 1);
  CHECK(linked.find(".version 9.0") != std::string::npos);
  CHECK(linked.find(".target sm_80") != std::string::npos);
  CHECK(Count(linked, ".extern .func") == 0);
  CHECK(Count(linked, ".extern .global") == 0);
  CHECK(Count(linked, ".extern .shared") == 1);
  CHECK(Count(linked, "counter = 5") == 1);
  CHECK(Count(linked, ".b8 $str[6]") == 1);
  CHECK(Count(linked, ".b8 $str__tu1[3]") == 1);
  CHECK(Count(linked, "mov.u64 %rd1, $str__tu1;") == 1);
  CHECK(Count(linked, "mov.u64 %rd2, $strange;") == 1);
}

TEST_CASE("the first weak definition wins and a doubled strong one is an error", "[simgpu][ptx]") {
  const std::string head = ".version 8.0\n.target sm_75\n.address_size 64\n";
  std::string linked;
  std::string error;
  REQUIRE(LinkPtx({head + ".weak .func f() { ret; }", head + ".weak .func f() { exit; }"}, &linked,
                  &error));
  CHECK(linked.find("ret;") != std::string::npos);
  CHECK(linked.find("exit;") == std::string::npos);
  CHECK_FALSE(LinkPtx({head + ".visible .func f() { ret; }", head + ".visible .func f() { ret; }"},
                      &linked, &error));
  CHECK(error.find("(f)") != std::string::npos);
}

TEST_CASE("a kernel may be declared before it is defined", "[simgpu][ptx]") {
  const std::string head = ".version 8.0\n.target sm_75\n.address_size 64\n";
  std::string linked;
  std::string error;
  REQUIRE(LinkPtx(
      {head + ".visible .entry k(.param .u32 p);\n.visible .entry k(.param .u32 p) { ret; }",
       head + ".visible .entry other() { ret; }"},
      &linked, &error));
  CHECK(KernelNames(linked) == std::vector<std::string>{"k", "other"});
}

TEST_CASE("the device runtime is linked only where it is used", "[simgpu][ptx]") {
  const std::string runtime =
      std::string(kCallee) + ".visible .global .align 4 .u32 __CNPRT_VERSION_NUMBER__ = 6000;";
  const std::string head = ".version 8.0\n.target sm_75\n.address_size 64\n";
  std::string linked;
  std::string error;
  REQUIRE(LinkPtx({head + ".visible .entry k() { ret; }", runtime}, &linked, &error));
  CHECK(KernelNames(linked) == std::vector<std::string>{"k"});
  REQUIRE(LinkPtx({kCaller, runtime}, &linked, &error));
  CHECK(KernelNames(linked) == std::vector<std::string>{"first", "second"});
}

TEST_CASE("one text is passed on as it is", "[simgpu][ptx]") {
  std::string linked;
  std::string error;
  REQUIRE(LinkPtx({kCaller}, &linked, &error));
  CHECK(linked == kCaller);
}
