// What torch_npu needs at link time besides the runtime: operators, descriptions, profiling. They answer success and do
// nothing; the few that must give something give a plain object.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "abi.h"

namespace {
struct Opaque {
    char nothing[64];
};

void* new_opaque() { return std::calloc(1, sizeof(Opaque)); }
}  // namespace

#define SIM_DOES_NOTHING(name) \
    SIM_API aclError name() { return acl::kSuccess; }

SIM_API void* aclCreateDataBuffer(void* /*data*/, size_t /*size*/) { return new_opaque(); }
SIM_API aclError aclDestroyDataBuffer(void* buffer) {
    std::free(buffer);
    return acl::kSuccess;
}
SIM_API void* aclCreateTensorDesc(int /*type*/, int /*num*/, const int64_t* /*sizes*/,
                                  int /*format*/) {
    return new_opaque();
}
SIM_API void aclDestroyTensorDesc(void* description) { std::free(description); }
SIM_API void* aclopCreateAttr() { return new_opaque(); }
SIM_API void aclopDestroyAttr(void* attribute) { std::free(attribute); }
SIM_API size_t aclGetTensorDescNumDims() { return 0; }
SIM_API int aclGetTensorDescType() { return 0; }
SIM_API int aclGetTensorDescFormat() { return 2; }

// After a refused operator torch_npu goes on without running any, and its results are what was in memory before. So an
// operator that is not simulated ends the process, unless a test that looks at no results wants it ignored.
SIM_API aclError aclopCompileAndExecute(const char* name) {
    const char* wish = std::getenv("MC2_ACL_SIM_UNKNOWN_OPERATORS");
    if (wish != nullptr && std::strcmp(wish, "ignore") == 0) {
        return acl::kSuccess;
    }
    std::fprintf(stderr, "ACL simulator: operator %s is not simulated\n", name);
    std::abort();
}
SIM_API aclError aclopCompileAndExecuteV2(const char* name) { return aclopCompileAndExecute(name); }

SIM_API size_t aclGetCompileoptSize(int /*option*/) { return 16; }
SIM_API aclError aclGetCompileopt(int /*option*/, char* value, size_t length) {
    std::memset(value, 0, length);
    return acl::kSuccess;
}

SIM_DOES_NOTHING(aclAppLog)
SIM_DOES_NOTHING(aclGetTensorDescDimV2)
SIM_DOES_NOTHING(aclSetCompileopt)
SIM_DOES_NOTHING(aclSetTensorDescName)
SIM_DOES_NOTHING(aclSetTensorFormat)
SIM_DOES_NOTHING(aclSetTensorPlaceMent)
SIM_DOES_NOTHING(aclSetTensorShape)
SIM_DOES_NOTHING(aclmdlFinalizeDump)
SIM_DOES_NOTHING(aclmdlInitDump)
SIM_DOES_NOTHING(aclmdlSetDump)
SIM_DOES_NOTHING(aclopSetAttrBool)
SIM_DOES_NOTHING(aclopSetAttrDataType)
SIM_DOES_NOTHING(aclopSetAttrFloat)
SIM_DOES_NOTHING(aclopSetAttrInt)
SIM_DOES_NOTHING(aclopSetAttrListBool)
SIM_DOES_NOTHING(aclopSetAttrListFloat)
SIM_DOES_NOTHING(aclopSetAttrListInt)
SIM_DOES_NOTHING(aclopSetAttrListListInt)
SIM_DOES_NOTHING(aclopSetAttrString)
SIM_DOES_NOTHING(aclopStartDumpArgs)
SIM_DOES_NOTHING(aclopStopDumpArgs)
SIM_DOES_NOTHING(aclrtBinaryGetFunction)
SIM_DOES_NOTHING(aclrtBinaryLoadFromData)
SIM_DOES_NOTHING(aclrtGetFunctionAddr)
SIM_DOES_NOTHING(aclrtProcessReport)
SIM_DOES_NOTHING(rtDevBinaryRegister)
SIM_DOES_NOTHING(rtFunctionRegister)
SIM_DOES_NOTHING(rtGetC2cCtrlAddr)
SIM_DOES_NOTHING(rtKernelLaunch)
SIM_DOES_NOTHING(MsprofGetHashId)
SIM_DOES_NOTHING(MsprofRegisterCallback)
SIM_DOES_NOTHING(MsprofReportAdditionalInfo)
SIM_DOES_NOTHING(MsprofReportApi)
SIM_DOES_NOTHING(MsprofReportCompactInfo)
SIM_DOES_NOTHING(MsprofSysCycleTime)
